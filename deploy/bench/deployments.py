"""Several deployments side by side on one private Ray, each as alone: only one works at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cluster.config import Config
from deploy.head_guard import guarded
from deploy.ray_head import plan_head, start_head
from deploy.session import check_models, enter_ray, own_cores
from paceline.client import Client
from workers.logs import new_run

CPUS_EACH = 2
"""What Ray is told that a deployment may reserve; all share the same cores."""


@contextmanager
def running_side_by_side(
    configs: Mapping[str, Config], *, home: Path, tell: Callable[[str], None]
) -> Iterator[dict[str, Client]]:
    """Yield a client a deployment; all is ended with the block.

    Workers are pinned to the cores of this process, the target to the first. Raises what
    check_models and start_cluster raise.
    """
    for config in configs.values():
        check_models(config, home=home)
    with ExitStack() as stack:
        tell("Ray: starting a local cluster")
        head = plan_head()
        stack.enter_context(guarded(head))
        start_head(head, num_cpus=CPUS_EACH * len(configs))
        if leave := enter_ray(head.address, own=True):
            stack.callback(leave)
        from cluster.launch import start_cluster

        clients: dict[str, Client] = {}
        for name, config in configs.items():
            handle = start_cluster(
                config,
                home=home,
                logs=new_run(home),
                progress=lambda line, name=name: tell(f"{name}: {line}"),  # type: ignore[misc]
                detached=False,
                name=None,
                cores=own_cores(),
            )
            stack.callback(handle.stop)
            clients[name] = stack.enter_context(Client(handle.address))
        yield clients
