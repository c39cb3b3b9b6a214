"""The `paceline` command: checks that the server's packages are installed, then runs app.py."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from deploy.session.signals import ending_on_signals

# The server's packages that commands need. `pip install paceline` installs none of them.
_SERVER_PACKAGES = (
    *("typer", "rich", "pydantic", "numpy", "torch", "transformers", "ray", "psutil"),
    *("fastapi", "uvicorn"),
)


def main() -> None:
    """Run the command line. Every error is one line on stderr. README.md lists the exit codes.

    SIGTERM unwinds the command as Ctrl-C does, so it cleans up, even while packages are imported.
    """
    with ending_on_signals():
        missing = [name for name in _SERVER_PACKAGES if find_spec(name) is None]
        if missing:
            print(
                f"error: this command needs {', '.join(missing)}, and only the client is "
                f"installed: pip install paceline-server",
                file=sys.stderr,
            )
            sys.exit(2)
        from deploy.cli.app import build_app
        from deploy.terminal.usage import run_app

        sys.exit(run_app(lambda: build_app(os.environ), "paceline"))


if __name__ == "__main__":
    main()
