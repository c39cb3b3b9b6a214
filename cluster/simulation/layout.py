"""What to simulate, as plain values: devices, links, costs of the programs, policy, load."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from cluster.config.plan_question import Hosts
from workers.drafting.desk import QUIET_SECONDS, QUIET_SECONDS_OF_MANY
from workers.emulated.latency_profiles import DeviceProfile, LinkProfile
from workers.emulated.replay_text import Guess


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Times of driver, drafters and gRPC in milliseconds (docs/planning.md).

    - `hop_ms`: a message from one process to another.
    - The driver, before a step leaves: `event_ms` for an event, `verdict_ms` for each verdict and
      `proposal_ms` for each proposal in it.
    - The driver, while the target computes: `settle_ms` to count a verdict and tell its caller,
      `tell_ms` for each message to a drafter.
    - A drafter: `draft_ms` for each proposal of a pass, as a part of the pass, and the same again
      to send it; `pause_ms` between two passes; `heed_ms` for each instruction that it reads. Then
      it waits `quiet_ms`, or with several sequences `quiet_of_many_ms`, for further messages.
    """

    hop_ms: float = 0.32
    event_ms: float = 0.18
    verdict_ms: float = 0.03
    proposal_ms: float = 0.025
    settle_ms: float = 0.04
    tell_ms: float = 0.05
    pause_ms: float = 0.18
    draft_ms: float = 0.003
    heed_ms: float = 0.015
    quiet_ms: float = 1000 * QUIET_SECONDS
    quiet_of_many_ms: float = 1000 * QUIET_SECONDS_OF_MANY

    def times(self, factor: float) -> HostCosts:
        """These costs with all work multiplied by `factor`. Waiting for messages stays."""
        done = [one.name for one in fields(self) if not one.name.startswith("quiet")]
        return replace(self, **{name: factor * getattr(self, name) for name in done})


@dataclass(frozen=True, slots=True)
class Rental:
    """Hosts to rent: `name` as the user wrote it, and the price of an hour, if prices are given."""

    name: str
    hosts: tuple[Hosts, ...]
    price_per_hour: float | None

    @property
    def gpus(self) -> int:
        """All GPUs, used or not."""
        return sum(one.count * one.gpus for one in self.hosts)


@dataclass(frozen=True, slots=True)
class Layout:
    """`cells` equal cells, each with `targets` drivers that share `drafters`.

    `replicas`: target groups of a driver, several of which may serve one request. `link`: between a
    driver and a drafter. `kv_blocks`: those of a target group, 16 tokens each. `beside`: cells of
    other devices behind the same router, under plain decoding. `rental`: the hosts that are paid
    for, and `card` the target's. `shared_host`: how long a step takes while a drafter computes, as
    a multiple of its time alone; None: drafters and target share no host.
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
    beside: tuple[Layout, ...] = ()
    rental: Rental | None = None
    card: str | None = None
    shared_host: float | None = None

    @property
    def name(self) -> str:
        """A readable name, such as "2 x (70b-4xh100 x 2 + 1b-h100), chain"."""
        devices = ", ".join(one.devices for one in (self, *self.beside))
        place = f"{self.rental.name}: " if self.rental else ""
        return f"{place}{devices}, {self.policy}"

    @property
    def devices(self) -> str:
        """The devices of all cells, such as "2 x (70b-4xh100 x 2 + 1b-h100)"."""
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
        return devices

    @property
    def gpus(self) -> int:
        """GPUs that are paid for: those of the rental, else those that the layout occupies."""
        return self.rental.gpus if self.rental else self.used_gpus

    @property
    def used_gpus(self) -> int:
        drafting = self.drafter.gpus * self.drafters if self.drafter is not None else 0
        own = self.cells * (self.groups_a_cell * self.target.gpus + drafting)
        return own + sum(one.used_gpus for one in self.beside)

    @property
    def groups(self) -> int:
        return self.cells * self.groups_a_cell + sum(one.groups for one in self.beside)

    @property
    def groups_a_cell(self) -> int:
        """Target groups of a cell, which share its drafters."""
        return self.targets * self.replicas


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of callers.

    Either `concurrency` callers send the next request as soon as one is answered, or requests
    arrive at random, `per_second` on average. `guess`: how drafters guess; its seed is that of the
    whole simulation. `temperature` changes only the text. `first_request`: the number of the first
    request; no two numbers have the same text. `out_of_step`: shorten the first answers, so that
    callers begin their next requests at different times, as they do in a long run.
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
