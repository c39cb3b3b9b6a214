"""The layouts that a question allows, and those that it names but that do not fit.

A question has either latency profiles by name on equal hosts, or hosts with cards to rent
([plan.rent]). For the latter, profiles are derived from shapes and cards, or measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster.config.model import Config
from cluster.config.plan_question import Hosts, ModelConfig, PlanConfig, RentConfig, hosts_of
from cluster.decoding.policies.off import OFF
from cluster.decoding.policy import LookaheadPolicy, policy_named
from cluster.simulation.closed_forms import best_lockstep_window
from cluster.simulation.layout import Layout, Rental
from cluster.simulation.target import BLOCK_SIZE
from paceline.errors import ConfigError
from paceline.text import counted
from workers.emulated.derived import (
    EFFICIENCY,
    GIB,
    SHAPES,
    Efficiency,
    Reduction,
    Room,
    Shape,
    derived_profile,
    read_shape,
    room_on,
)
from workers.emulated.latency_profiles import DeviceProfile, LinkProfile, load_profile, read_profile
from workers.engine.kv_blocks import blocks_for

KV_TOKENS = 131_072
"""Tokens whose KV a target group holds, if the question says nothing about it."""
MOST_KV_TOKENS = 1 << 20
"""Upper bound on the tokens whose KV is simulated of a target group."""
_DEGREES = (1, 2, 4, 8, 16)
"""Cards of a target group that are tried: all for plain decoding, and where none are given."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was asked for, in which layout, and why it cannot be."""

    layout: str
    what: str
    why: str


def candidates(config: Config) -> tuple[list[Layout], list[Skipped]]:
    """All layouts to simulate, and what is left out.

    Raises ConfigError if nothing fits, if no layout can have any of the policies that the question
    names, or if the KV holds no request.
    """
    asked = config.plan
    least = blocks_for(asked.prompt_tokens + asked.output_tokens, BLOCK_SIZE) * BLOCK_SIZE
    if (asked.kv_tokens or KV_TOKENS) < least:
        raise ConfigError(
            f"plan.kv_tokens: expected at least {least} for requests of {asked.prompt_tokens} "
            f"prompt and {asked.output_tokens} output tokens, got {asked.kv_tokens or KV_TOKENS}; "
            "give more KV, or fewer prompt_tokens or output_tokens"
        )
    skipped: list[Skipped] = []
    if asked.rent is not None:
        layouts = list(_Renting(config, asked.rent, least).layouts(skipped))
    else:
        layouts = list(_on_equal_hosts(config, skipped))
    if not layouts:
        raise ConfigError(_nothing_fits(asked, skipped))
    named = "policies" in asked.model_fields_set
    drafting = [name for name in asked.policies if policy_named(name).drafts]
    if named and drafting and not {one.policy for one in layouts} & set(drafting):
        why = "; ".join(f"{one.layout}: {one.what} {one.why}" for one in skipped[:4])
        raise ConfigError(f"plan.policies: no layout can have any of {', '.join(drafting)}: {why}")
    return layouts, skipped


def _nothing_fits(asked: PlanConfig, skipped: Sequence[Skipped]) -> str:
    if asked.rent is not None:
        why = "; ".join(f"{one.layout}: {one.what} {one.why}" for one in skipped[:4])
        return f"plan.rent.layouts: none can serve {asked.rent.target}: {why}"
    return (
        f"plan.target: none of {', '.join(asked.target)} fits {counted(asked.hosts, 'host')} "
        f"of {asked.gpus_per_host} GPUs; give more hosts or another target"
    )


def _lacking(policy: LookaheadPolicy, targets: int, drafters: int) -> str | None:
    """What a layout lacks for a policy; None: nothing."""
    needs = policy.needs
    if targets < needs.groups:
        return f"needs {needs.groups} or more target groups, there is {targets}"
    if drafters < max(1, needs.drafters):
        return f"needs {max(1, needs.drafters)} or more drafters, there is {drafters}"
    return None


def _on_equal_hosts(config: Config, skipped: list[Skipped]) -> Iterator[Layout]:
    asked = config.plan
    kv_tokens = asked.kv_tokens or KV_TOKENS
    for target_name in asked.target:
        target = load_profile(target_name, role="target")
        most_groups = _groups_that_fit(target, asked)
        if most_groups:
            yield _layout(config, target, OFF, cells=most_groups, kv_tokens=kv_tokens)
        for drafter_name in asked.drafter:
            drafter = load_profile(drafter_name, role="drafter")
            for ratio in asked.ratios:
                targets, drafters = map(int, ratio.split(":"))
                gpus = targets * target.gpus + drafters * drafter.gpus
                there = asked.hosts * asked.gpus_per_host
                cells = min(most_groups // targets, there // gpus)
                place = f"{target_name} with {drafter_name}, {ratio}"
                if not cells:
                    why = f"needs {counted(gpus, 'GPU')}, there are {there} GPUs"
                    skipped.append(Skipped(place, "drafting", why))
                    continue
                one = _layout(config, target, OFF, cells=cells, kv_tokens=kv_tokens)
                yield from _with_drafters(
                    config,
                    one,
                    drafter,
                    cells * targets,
                    cells * drafters,
                    divisions=(cells,),
                    place=place,
                    skipped=skipped,
                )


def _with_drafters(
    config: Config,
    plain: Layout,
    drafter: DeviceProfile,
    all_targets: int,
    all_drafters: int,
    *,
    divisions: Sequence[int],
    place: str,
    skipped: list[Skipped],
) -> Iterator[Layout]:
    """The layout under each policy, in the first of `divisions` into cells in which it fits."""
    for name in config.plan.policies:
        policy = policy_named(name)
        if not policy.drafts:
            continue
        for cells in divisions:
            targets, drafters = all_targets // cells, all_drafters // cells
            lacks = _lacking(policy, targets, drafters)
            if lacks is None:
                break
        if lacks is not None:
            skipped.append(Skipped(place, name, lacks))
            continue
        shared = policy.needs.groups > 1  # One driver owns all groups and shares them.
        yield replace(
            plain,
            cells=cells,
            policy=name,
            window=_window(config, plain.target, drafter, policy),
            branches=1 if policy.needs.chains_only else config.speculation.branches,
            drafter=drafter,
            targets=1 if shared else targets,
            replicas=targets if shared else 1,
            drafters=drafters,
        )


def _groups_that_fit(target: DeviceProfile, asked: PlanConfig) -> int:
    """Target groups that fit. Each takes whole shares of as many hosts as its profile says."""
    on_each = target.gpus // target.hosts
    return asked.hosts // target.hosts * (asked.gpus_per_host // on_each)


def _window(
    config: Config, target: DeviceProfile, drafter: DeviceProfile, policy: LookaheadPolicy
) -> int:
    if policy.drafting_is_free:
        return config.speculation.window
    return best_lockstep_window(
        config.plan.acceptance,
        step_ms=target.pass_ms.ms(1, 1),
        draft_ms=drafter.pass_ms.ms(1, 1),
        rtt_ms=config.plan.rtt_ms,
        tokens_a_pass=drafter.tokens_a_pass,
    )


def _layout(
    config: Config,
    target: DeviceProfile,
    policy: LookaheadPolicy,
    *,
    cells: int,
    kv_tokens: int,
) -> Layout:
    asked, speculation = config.plan, config.speculation
    return Layout(
        target=target,
        policy=policy.name,
        window=speculation.window,
        cells=cells,
        branches=1 if policy.needs.chains_only else speculation.branches,
        link=LinkProfile(rtt_ms=asked.rtt_ms, mbit_per_second=asked.mbit_per_second),
        max_num_seqs=config.target.max_num_seqs,
        wait_ms=speculation.wait_ms,
        kv_blocks=min(kv_tokens, MOST_KV_TOKENS) // BLOCK_SIZE,
        prefix_cache=config.target.prefix_cache,
    )


class _Renting:
    """Layouts on hosts to rent."""

    def __init__(self, config: Config, rent: RentConfig, least_tokens: int) -> None:
        asked = config.plan
        self._config, self._rent = config, rent
        self._cards = rent.known_cards
        self._least_tokens = least_tokens
        self._context = asked.prompt_tokens + asked.output_tokens // 2
        self._target = _Model.named(rent, rent.target, "target")
        self._drafter = _Model.named(rent, rent.drafter, "drafter")
        self._most_callers = max(asked.concurrency or (1,))

    def layouts(self, skipped: list[Skipped]) -> Iterator[Layout]:
        """The layouts of each rental. Plain decoding on all GPUs comes first."""
        for text in self._rent.layouts:
            hosts = hosts_of(text)
            prices = self._rent.prices
            price = (
                sum(one.count * one.gpus * prices[one.card] for one in hosts) if prices else None
            )
            rental = Rental(text, hosts, price)
            plain = list(self._plain(rental, skipped))
            yield from plain
            if plain and any(one.drafters for one in hosts):
                yield from self._drafting(rental, skipped)

    def _plain(self, rental: Rental, skipped: list[Skipped]) -> Iterator[Layout]:
        """Plain decoding on all GPUs, those for drafters included, in several divisions."""
        all_hosts = [replace(one, drafters=0) for one in rental.hosts]
        cards = sorted(
            {one.card for one in all_hosts}, key=lambda card: -self._memory_of(all_hosts, card)
        )
        main, *others = cards
        every = {*_DEGREES, *self._degrees()}
        beside = []
        for card in others:
            one = next(self._groups(all_hosts, card, every, rental), None)
            if one is not None:
                beside.append(one)
            else:
                what = f"plain decoding on {card}"
                skipped.append(Skipped(rental.name, what, self._why(card, all_hosts, every)))
        mains = list(self._groups(all_hosts, main, every, rental))
        if not mains and beside:
            mains, beside = [beside[0]], beside[1:]
        elif not mains:
            why = self._why(main, all_hosts, every)
            skipped.append(Skipped(rental.name, f"plain decoding on {main}", why))
        for one in mains:
            if beside:
                yield replace(one, beside=tuple(beside))
            yield one

    def _drafting(self, rental: Rental, skipped: list[Skipped]) -> Iterator[Layout]:
        """Targets on the other GPUs, and a drafter on each GPU for drafters."""

        def skip(why: str) -> None:
            skipped.append(Skipped(rental.name, "drafting", why))

        target_cards = {one.card for one in rental.hosts if one.drafters < one.gpus}
        drafter_cards = {one.card for one in rental.hosts if one.drafters}
        for role, cards in (("target", target_cards), ("drafters", drafter_cards)):
            if len(cards) > 1:
                return skip(f"needs one card for the {role}, there are {', '.join(sorted(cards))}")
        [target_card], [drafter_card] = target_cards, drafter_cards
        num_drafters = sum(one.count * one.drafters for one in rental.hosts)
        held = self._config.target.max_num_seqs
        room = room_on(
            self._cards[drafter_card],
            self._drafter.shape,
            cards=1,
            least_tokens=min(held, self._most_callers) * self._least_tokens,
        )
        if room.lacks_gib:
            return skip(_lack(drafter_card, room, self._drafter.name))
        drafter = self._drafter.profile(drafter_card, self._rent, context=self._context)
        found = list(self._groups(rental.hosts, target_card, self._degrees(), rental))
        if not found:
            return skip(self._why(target_card, rental.hosts, self._degrees()))
        for plain in found if self._rent.tensor_parallel else [self._smallest_for_load(found)]:
            most = math.gcd(plain.cells, num_drafters)
            yield from _with_drafters(
                self._config,
                plain,
                drafter,
                plain.cells,
                num_drafters,
                divisions=[cells for cells in range(most, 0, -1) if most % cells == 0],
                place=f"{rental.name}: {plain.devices}",
                skipped=skipped,
            )
        return None

    def _degrees(self) -> Sequence[int]:
        return self._rent.tensor_parallel or _DEGREES

    def _smallest_for_load(self, found: Sequence[Layout]) -> Layout:
        """The layout with the fewest cards a group whose KV holds the load; else the largest."""
        for one in found:
            callers = min(self._most_callers / one.groups, one.max_num_seqs)
            if one.kv_blocks * BLOCK_SIZE >= callers * self._least_tokens:
                return one
        return found[-1]

    def _groups(
        self, hosts: Sequence[Hosts], card: str, degrees: Iterable[int], rental: Rental
    ) -> Iterator[Layout]:
        """Plain decoding on the GPUs of a card that are not for drafters, by cards a group."""
        asked = self._config.plan
        for degree in sorted(degrees):
            room = self._room(card, degree)
            groups, spans = _groups_on([one for one in hosts if one.card == card], degree)
            kv_tokens = asked.kv_tokens or room.kv_tokens
            if groups and not room.lacks_gib:
                profile = self._target.profile(
                    card, self._rent, cards=degree, hosts=spans, context=self._context
                )
                yield replace(
                    _layout(self._config, profile, OFF, cells=groups, kv_tokens=kv_tokens),
                    rental=rental,
                    card=card,
                )

    def _room(self, card: str, degree: int) -> Room:
        least = self._config.plan.kv_tokens or self._least_tokens
        return room_on(self._cards[card], self._target.shape, cards=degree, least_tokens=least)

    def _memory_of(self, hosts: Iterable[Hosts], card: str) -> float:
        gpus = sum(one.count * one.gpus for one in hosts if one.card == card)
        return gpus * self._cards[card].memory_gb

    def _why(self, card: str, hosts: Iterable[Hosts], degrees: Collection[int]) -> str:
        """Why the target has no group on the GPUs of a card."""
        there = [one for one in hosts if one.card == card]
        wanted = ", ".join(map(str, sorted(degrees)))
        possible = [degree for degree in degrees if _groups_on(there, degree)[0]]
        if not possible:
            gpus = " + ".join(f"{one.count} x {one.gpus - one.drafters}" for one in there)
            return f"needs groups of {wanted} {card}, there are {gpus}"
        return _lack(card, self._room(card, max(possible)), self._target.name, max(possible))


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of the question: its shape, and its profile on each card."""

    name: str
    role: Literal["target", "drafter"]
    shape: Shape
    efficiency: Efficiency
    measured: Mapping[tuple[str, int], DeviceProfile]

    @classmethod
    def named(cls, rent: RentConfig, name: str, role: Literal["target", "drafter"]) -> _Model:
        """The model with this name. Raises ConfigError, which names the key of a bad file."""
        given = rent.models.get(name, ModelConfig())
        key = f"plan.rent.models.{name}"
        try:
            shape = given.shape or (
                read_shape(Path(given.config).expanduser()) if given.config else SHAPES[name]
            )
        except ConfigError as error:
            raise ConfigError(f"{key}.config: {error}") from None
        usual = EFFICIENCY[role]
        measured = {}
        for card, files in given.measured.items():
            for file in files:
                try:
                    profile = read_profile(Path(file).expanduser(), name=f"{name} {card}")
                except ConfigError as error:
                    raise ConfigError(f"{key}.measured.{card}: {error}") from None
                measured[card, profile.gpus] = profile.model_copy(
                    update={"role": role, "name": _profile_name(name, card, profile.gpus)}
                )
        return cls(
            name,
            role,
            shape,
            Efficiency(
                given.bandwidth_share or usual.bandwidth_share,
                given.compute_share or usual.compute_share,
                usual.launch_ms if given.launch_ms is None else given.launch_ms,
            ),
            measured,
        )

    def profile(
        self, card: str, rent: RentConfig, *, context: int, cards: int = 1, hosts: int = 1
    ) -> DeviceProfile:
        """The measured profile, else the derived one."""
        if hosts == 1 and (card, cards) in self.measured:
            return self.measured[card, cards]
        found = rent.known_cards[card]
        within = Reduction(rent.all_reduce_us, found.link_gb_s)
        between = Reduction(
            rent.all_reduce_us_between_hosts, min(found.link_gb_s, rent.gb_s_between_hosts)
        )
        return derived_profile(
            _profile_name(self.name, card, cards, hosts),
            self.shape,
            found,
            self.efficiency,
            role=self.role,
            card_name=card,
            cards=cards,
            hosts=hosts,
            reduction=within if hosts == 1 else between,
            context=context,
        )


def _profile_name(model: str, card: str, cards: int, hosts: int = 1) -> str:
    """A name such as "llama-3-70b on 4 h100-sxm"."""
    over = f" of {hosts} hosts" if hosts > 1 else ""
    return f"{model} on {cards} {card}{over}" if cards > 1 else f"{model} on {card}"


def _groups_on(hosts: Iterable[Hosts], degree: int) -> tuple[int, int]:
    """Groups of `degree` cards on the GPUs that are not for drafters, and the hosts of a group.

    A group has all its cards on one host, or all such GPUs of several hosts.
    """
    groups, spans = 0, 1
    for one in hosts:
        free = one.gpus - one.drafters
        if free >= degree:
            groups += one.count * (free // degree)
        elif free and degree % free == 0:
            over = one.count // (degree // free)
            groups += over
            spans = max(spans, degree // free) if over else spans
    return groups, spans


def _lack(card: str, room: Room, model: str, cards: int = 1) -> str:
    """Which card lacks how much."""
    kv = room.least_tokens * room.kv_of_a_token / GIB
    each = f"each of {cards} {card}" if cards > 1 else card
    return (
        f"does not fit: {each} lacks {room.lacks_gib:.1f} GiB for {model}: "
        f"{room.weights / GIB:.1f} GiB of weights and {kv:.1f} of KV for {room.least_tokens} "
        f"tokens, of {room.usable / GIB:.1f} usable"
    )
