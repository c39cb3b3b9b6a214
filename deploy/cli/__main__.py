"""The `paceline` command: checks that the server's packages are installed, then runs app.py."""

from __future__ import annotations

import os
import sys

from deploy.session.packages import missing_packages
from deploy.session.signals import ending_on_signals
from paceline.text import install_hint


def main() -> None:
    """Run the command line. Every error is one line on stderr. docs/cli.md lists the exit codes.

    SIGTERM unwinds the command as Ctrl-C does, so it cleans up, even while packages are imported.
    """
    with ending_on_signals():
        if missing := missing_packages():
            sys.stderr.write(
                f"error: this command needs {', '.join(missing)}, and only the client is "
                f"installed; {install_hint()}\n"
            )
            sys.exit(2)
        from deploy.cli.app import build_app
        from deploy.terminal.usage import run_app

        sys.exit(run_app(lambda: build_app(os.environ), "paceline"))


if __name__ == "__main__":
    main()
