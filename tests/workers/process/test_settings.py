"""gRPC reads its variables once, when it is imported, so ours must be set before that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, os, sys
importlib.import_module(sys.argv[1])
order = list(sys.modules)
is_early = order.index("workers.process.settings") < order.index("grpc")
print(is_early, os.environ["GRPC_EXPERIMENTS"])
print(os.environ["GRPC_VERBOSITY"])
"""


@pytest.mark.parametrize(
    "module", ["workers.process.server", "cluster.driver.connections", "deploy.cli.generate"]
)
@pytest.mark.parametrize("operators", [None, "tcp_frame_size_tuning"])
def test_they_are_set_in_time_unless_an_operator_says_otherwise(
    module: str, operators: str | None
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    if operators is not None:
        environ["GRPC_EXPERIMENTS"] = operators
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, module], env=environ, capture_output=True, text=True
    )
    expected = operators or "-event_engine_client,-event_engine_listener"
    assert told.stdout.split() == ["True", expected, "ERROR"], told.stderr
