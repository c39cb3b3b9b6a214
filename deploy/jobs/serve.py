"""Serves as a Ray job.

    ray job submit --working-dir . -- python -m deploy.jobs.serve [CONFIG]

It imports what it needs once it knows that this Python has it.
"""

from __future__ import annotations

import sys

from deploy.session.packages import check_python


def main() -> None:
    check_python("deploy.jobs.serve")
    import typer

    from deploy.jobs.serving import serve
    from deploy.terminal.usage import run_app

    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    job.command()(serve)
    sys.exit(run_app(lambda: job, "deploy.jobs.serve"))


if __name__ == "__main__":
    main()
