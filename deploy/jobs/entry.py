"""How a job begins: it checks that this Python has what the job needs.

`ray job submit --working-dir .` brings our code to whatever Python the cluster's PATH names.
"""

from __future__ import annotations

import sys

from deploy.session.packages import missing_packages


def check_python(module: str) -> None:
    """End this process with exit code 2 if its Python lacks packages; stderr says what to do."""
    if missing := missing_packages():
        sys.stderr.write(
            f"error: {sys.executable} lacks {', '.join(missing)}. The PATH of the cluster's head "
            "decided which python runs this job. Name one that has paceline-server: `ray job "
            f"submit ... -- /path/to/.venv/bin/python -m {module} ...`, or install it in this one "
            "(docs/operations.md)\n"
        )
        sys.exit(2)
