"""What is simulated: devices, links, policy, load. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.decoding.policies import PolicyName
from cluster.simulation.costs import HostCosts
from workers.emulated.profiles import DeviceProfile, LinkProfile
from workers.emulated.replay_text import Guess


@dataclass(frozen=True, slots=True)
class Layout:
    """`cells` alike, each of `targets` drivers that share `drafters`.

    `replicas`: target groups of a driver, on which requests may be served by several.
    `link`: between a driver and a drafter. `kv_blocks`: of a target group, 16 tokens each.
    """

    target: DeviceProfile
    policy: PolicyName
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
        """For people: "2 x (70b-4xh100 x 2 + 1b-h100), chain"."""
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
        return f"{devices}, {self.policy.value}"

    @property
    def gpus(self) -> int:
        """GPUs that it occupies."""
        drafting = self.drafter.gpus * self.drafters if self.drafter is not None else 0
        return self.groups * self.target.gpus + self.cells * drafting

    @property
    def groups(self) -> int:
        """Target groups in all."""
        return self.cells * self.groups_a_cell

    @property
    def groups_a_cell(self) -> int:
        """Target groups that share drafters."""
        return self.targets * self.replicas


@dataclass(frozen=True, slots=True)
class Load:
    """What callers ask. Either `concurrency` of them ask again as soon as they are answered, or
    requests arrive at random, `per_second` of them on average.

    `guess`: how drafters guess; its seed is that of the whole simulation. `temperature` is of no
    consequence but for the text. `first_request`: requests are numbered from there on, and no two
    numbers have the same text. `out_of_step`: the first answers are cut so that callers do not all
    begin their next ones together, as they do not where they have been asking for long.
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
