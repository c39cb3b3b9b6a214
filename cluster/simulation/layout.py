"""What to simulate, as plain values: devices, links, policy, load."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.simulation.costs import HostCosts
from workers.emulated.profiles import DeviceProfile, LinkProfile
from workers.emulated.replay_text import Guess


@dataclass(frozen=True, slots=True)
class Layout:
    """`cells` equal cells, each with `targets` drivers that share `drafters`.

    `replicas`: target groups of a driver, several of which may serve one request. `link`: between a
    driver and a drafter. `kv_blocks`: those of a target group, 16 tokens each.
    """

    target: DeviceProfile
    policy: str
    window: int
    drafter: DeviceProfile | None = None
    drafters: int = 0
    targets: int = 1
    replicas: int = 1
    cells: int = 1
    branches: int = 1
    link: LinkProfile = field(default_factory=LinkProfile)
    max_num_seqs: int = 64
    max_step_tokens: int = 2048
    wait_ms: float = 1000.0
    kv_blocks: int = 4096
    prefix_cache: bool = True
    costs: HostCosts = field(default_factory=HostCosts)

    @property
    def name(self) -> str:
        """A readable name, such as "2 x (70b-4xh100 x 2 + 1b-h100), chain"."""
        devices = self.target.name
        if self.targets > 1:
            devices += f" x {self.targets}"
        if self.replicas > 1:
            devices += f" of {self.replicas} replicas"
        if self.drafter is not None:
            devices += f" + {self.drafter.name}"
            devices += f" x {self.drafters}" if self.drafters > 1 else ""
        if self.cells > 1:
            devices = f"{self.cells} x ({devices})"
        return f"{devices}, {self.policy}"

    @property
    def gpus(self) -> int:
        """GPUs that the layout occupies."""
        drafting = self.drafter.gpus * self.drafters if self.drafter is not None else 0
        return self.groups * self.target.gpus + self.cells * drafting

    @property
    def groups(self) -> int:
        """Target groups of all cells."""
        return self.cells * self.groups_a_cell

    @property
    def groups_a_cell(self) -> int:
        """Target groups of a cell, which share its drafters."""
        return self.targets * self.replicas


@dataclass(frozen=True, slots=True)
class Load:
    """What callers ask.

    Either `concurrency` callers ask again as soon as they are answered, or requests arrive at
    random, `per_second` on average. `guess`: how drafters guess; its seed is that of the whole
    simulation. `temperature` changes only the text. `first_request`: the number of the first
    request; no two numbers have the same text. `out_of_step`: shorten the first answers, so that
    callers do not begin their next requests together. In a long run they do not either.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    guess: Guess
    concurrency: int | None = None
    per_second: float | None = None
    temperature: float = 0.0
    first_request: int = 0
    out_of_step: bool = False

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.per_second is None):
            raise ValueError("a load has a concurrency or requests per second, one of the two")
