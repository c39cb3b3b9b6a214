"""Settings of every test run, and what many tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.cluster.two_hosts import SecondHost

MOST_TOLD = 50
"""Lines that `make flaky` prints."""

# Before ray, grpc or transformers are imported, here or in a process that a test starts.
os.environ.update(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        # As in deploy/session/ray_head.py: the heads of tests listen on loopback alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "disabled",
        # A call of Ray outside a cluster fails, instead of starting a cluster of its own.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "GRPC_VERBOSITY": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
# For our GPU kernels without a GPU. Triton reads it when they are imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Tests connect only to the cluster that they start, not to one that happens to run.
os.environ.pop("RAY_ADDRESS", None)
for _variable in [name for name in os.environ if name.startswith("PACELINE_") and "__" in name]:
    del os.environ[_variable]

# Hypothesis draws the same examples in every run, so that what passed once passes again, and no
# bound is on how long one takes: a busy host is no fault of what is tested.
# `pytest --hypothesis-profile explore` draws new ones.
settings.register_profile(
    "explore", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--kernels`: on a GPU, our own kernels run as with target.kernels = true (docs/gpu.md).
    `--chaos-seed`: which faults the chaos tests cause, and when; `--chaos-minutes`: for how long
    the long one does.
    """
    parser.addoption("--kernels", action="store_true", help="our own GPU kernels run")
    parser.addoption("--chaos-minutes", type=int, default=10, help="length of the long chaos test")
    parser.addoption("--chaos-seed", type=int, default=18, help="seed of the random faults")


def pytest_configure(config: pytest.Config) -> None:
    """Set `target.kernels` before any test makes an engine."""
    if config.getoption("--kernels"):
        from workers.process.kernels import use_kernels

        use_kernels(True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a GPU, and run those marked `timing` once more if they fail.
    With several processes, chaos, then Ray's tests and then other long ones come first.
    """
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (
                "chaos" not in item.path.name,
                item.get_closest_marker("ray") is None,
                item.get_closest_marker("long") is None,
            )
        )
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave tests/vllm to `make test-vllm`, which runs it in vLLM's environment."""
    return True if collection_path == Path(__file__).parent / "vllm" else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how tests failed first that were run once more, and keep it for `make flaky`."""
    first = terminalreporter.getreports("rerun")
    if not first or hasattr(config, "workerinput"):
        return
    last = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
    again = {report.nodeid for report in last}
    terminalreporter.section("failed first")
    assert config.cache is not None
    kept = config.cache.mkdir("failed-first") / "tests"
    told = kept.read_text().splitlines() if kept.exists() else []
    for report in first:
        then = "failed again" if report.nodeid in again else "passed"
        told.append(f"{datetime.now():%Y-%m-%d %H:%M} {report.nodeid}: {then} when run once more")
        terminalreporter.write_line(f"{report.longreprtext}\n{told[-1]}\n")
    kept.write_text("\n".join(told[-MOST_TOLD:]) + "\n")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Divide the tests among processes file by file, in the order of collection.

    Files with Ray come first, because they take longest. One process runs all files that share a
    cluster (`ray_address`). Files that start clusters of their own may run in any process.
    """
    from xdist.scheduler import LoadScopeScheduling

    def scope_of(nodeid: str) -> str:
        path, _, _ = nodeid.partition("::")
        shares_ray = "ray_address:" in (config.rootpath / path).read_text(encoding="utf-8")
        return "shared Ray" if shares_ray else path

    scheduler: Any = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo checkpoint in the user's cache, fetched once if it is absent."""
    from workers.models.catalog import default_home, resolve_model

    return resolve_model("demo", home=default_home(os.environ)).folder


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The one Ray cluster of a test session, joined. The first test that needs it starts it.

    It has more CPUs than the machine, so no test waits for those of another.
    """
    from deploy.session.ray_head import start_head, stop_head

    head = start_head(num_cpus=16)
    try:
        from cluster.placement import launch

        launch.connect(head.address)
        yield head.address
        launch.disconnect()
    finally:
        stop_head(head)


@pytest.fixture(scope="session")
def chaos_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the chaos tests' faults."""
    return int(pytestconfig.getoption("--chaos-seed"))


@pytest.fixture(scope="module")
def second_host() -> Iterator[SecondHost]:
    """Another host at the other end of a cable. Skips if this machine does not allow it."""
    from tests.cluster.two_hosts import CannotMakeHostsError, SecondHost

    try:
        with SecondHost() as second:
            yield second
    except CannotMakeHostsError as error:
        pytest.skip(f"needs root and `ip netns`: {error}")
