"""The head of a Ray cluster is lost: what runs on other nodes goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import Chunk, Client, Retries
from tests.cluster.two_hosts import HERE, SecondHost
from tests.cluster_faults.killing import KILL_AT, PROMPT, options_of, plain_tokens
from tests.cluster_faults.ray_nodes import Job, RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.long]

# 18 ms a token of plain decoding on any machine.
CONFIG = """
[target]
emulated = "70b-4xh100"
threads = 1
[[drafters]]
emulated = "1b-h100"
threads = 1
[speculation]
window = 4
[server]
host = "0.0.0.0"
grpc_port = 0
http = false
"""


def test_requests_on_other_nodes_outlive_the_head(second_host: SecondHost, tmp_path: Path) -> None:
    """Those that run, and new ones too: they need neither Ray nor the controller."""
    config = tmp_path / "paceline.toml"
    config.write_text(CONFIG)
    with RayNodes(HERE, num_cpus=0) as nodes:
        nodes.add(second_host.host, num_cpus=2)
        with (
            Job(nodes, config) as job,
            Client(job.next_address(), retries=Retries(0)) as client,
        ):
            plain = plain_tokens(client)
            token_ids: list[int] = []
            lost = False
            for event in client.stream(PROMPT, options_of("chain")):
                token_ids += event.token_ids if isinstance(event, Chunk) else ()
                if len(token_ids) >= KILL_AT and not lost:
                    nodes.lose(HERE.address)
                    lost = True
            assert lost
            assert tuple(token_ids) == plain
            assert client.generate(PROMPT, options_of("chain")).token_ids == plain
