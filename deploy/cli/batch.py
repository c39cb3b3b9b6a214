"""`paceline batch`: answers OpenAI's batch file on a cluster."""

from __future__ import annotations

from deploy.batch import run
from deploy.cli.reach import reach_cluster
from deploy.terminal.usage import as_command

batch = as_command(run.batch, reach=reach_cluster, check_path=None)
