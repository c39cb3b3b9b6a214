"""Configurations of the last release load as they did.

`old_files.txt` has each one that README.md, docs/ and the chart had at commit 3efa305f, before any
release had a tag. A release replaces it: the texts of its tag, without comments and empty lines.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.config.load import load_config
from paceline.errors import ConfigError

_FILE = Path(__file__).with_name("old_files.txt")
_TEXTS = [
    (name, text)
    for name, text in re.findall(r"==== (\S+)\n(.*?)(?=^====|\Z)", _FILE.read_text(), re.S | re.M)
]
_VALUES: dict[str, dict[str, object]] = {
    "docs/70b.md": {
        "target.tensor_parallel": 4,
        "target.resources": "gpu",
        "target.max_model_len": 16384,
        "target.dtype": "auto",
        "target.prefix_cache": True,
        "drafters.0.kind": "model",
        "drafters.0.model": "meta-llama/Llama-3.2-1B-Instruct",
        "drafters.0.count": 1,
        "speculation.policy": "auto",
        "server.host": "0.0.0.0",
        "server.api_keys": str(Path("keys.jsonl").absolute()),
    },
    "docs/drafter-pool.md": {
        "server.name": "drafters",
        "target.groups": 0,
        "drafters.0.count": 2,
        "drafters.0.threads": 1,
    },
    "docs/drafter-pool.md 2": {"drafters": (), "pool.name": "drafters", "pool.party": "search"},
    "docs/drafter-pool.md 3": {"pool.addresses": ("drafters.speculation.svc:9002",)},
    "docs/drafter-pool.md 4": {
        "pool.near": ("ray.io/node-id", "rack", "zone"),
        "pool.labels": {"zone": "a"},
    },
    "docs/drafters.md": {"drafters.0.model": "OUT"},
    "docs/emulation.md": {
        "target.emulated": "70b-4xh100",
        "drafters.0.emulated": "1b-h100",
        "drafters.0.acceptance": 0.85,
        "drafters.0.hit_rate": 0.5,
    },
    "docs/http.md": {"server.cors_origins": ("https://chat.example.com",)},
    "docs/models.md": {"target.model": "HuggingFaceTB/SmolLM2-135M-Instruct@main"},
    "docs/models.md 2": {"target.model": "/models/some-70b", "target.tensor_parallel": 4},
    "docs/models.md 3": {
        "target.gpu": "H100",
        "target.environment": {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "mlx5_0,mlx5_1"},
        "drafters.0.selector": {"zone": "a", "ray.io/accelerator-type": "L40S"},
    },
    "docs/operations.md": {"server.name": "search"},
    "docs/policies.md": {"drafters.0.kind": "ngram", "drafters.0.own_process": True},
    "docs/policies.md 2": {
        "drafters.0.options": {"max_model_len": 8192, "kv_memory_mib": 2048},
    },
    "docs/policies.md 3": {"speculation.merge": True, "drafters.1.kind": "ngram"},
    "docs/quickstart.md": {
        "target.model": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "speculation.policy": "auto",
    },
    "docs/quickstart.md 2": {
        "target.model": "demo",
        "target.threads": "auto",
        "target.kv_memory": "auto",
        "drafters.0.kind": "ngram",
        "drafters.0.model": None,
        "speculation.window": 8,
        "speculation.verification": "coupled",
        "server.http_port": 8000,
        "server.grpc_port": 8001,
    },
    "docs/examples/rent.toml": {
        "plan.concurrency": (4, 16),
        "plan.policies": ("chain", "fanout", "replicas"),
        "plan.rent.prices": {"h100-sxm": 2.5, "h200": 3.5, "l40s": 0.9},
        "plan.rent.max_token_ms": 25.0,
    },
    "k8s/paceline/values.yaml": {"target.model": "demo", "drafters.0.model": "demo-draft"},
    "k8s/paceline/examples/five-gpus.yaml": {
        "speculation.policy": "fanout",
        "speculation.branches": 2,
    },
    "k8s/paceline/examples/one-gpu.yaml": {"drafters.0.kind": "ngram"},
    "k8s/paceline/examples/public.yaml": {
        "workers.tls": "/etc/paceline/workers-tls",
        "server.api_keys": "/etc/paceline/keys/keys.jsonl",
        "server.tls_cert": "/etc/paceline/server-tls/tls.crt",
        "server.tls_key": "/etc/paceline/server-tls/tls.key",
    },
    "k8s/paceline/examples/two-hosts.yaml": {
        "target.selector": {"ray.io/accelerator-type": "H100"},
        "target.environment": {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"},
        "drafters.0.selector": {"pool": "drafters", "ray.io/accelerator-type": "L40S"},
    },
}
"""Some values of each: by its file, and its number there from 2."""


def _named() -> dict[str, str]:
    named: dict[str, str] = {}
    for file, text in _TEXTS:
        number = 1 + sum(name.partition(" ")[0] == file for name in named)
        named[file if number == 1 else f"{file} {number}"] = text
    return named


def _value(config: object, place: str) -> object:
    for name in place.split("."):
        config = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
    return config


@pytest.mark.parametrize("name", _named())
def test_a_configuration_of_the_last_release_loads_as_it_did(name: str, tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(_named()[name], encoding="utf-8")
    config = load_config(path, {})
    assert {place: _value(config, place) for place in _VALUES[name]} == _VALUES[name]


def test_a_key_that_no_release_had_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(_named()["docs/70b.md"].replace("max_model_len", "max_model_length"))
    with pytest.raises(ConfigError, match=r"unknown key target\.max_model_length"):
        load_config(path, {})
