"""How a request speculates, and whether its policy, rule and drafters fit together.

The driver asks for each request, the configuration for its defaults, and commands for their flags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cluster.decoding.policy import POLICIES, policy_named
from paceline.errors import InvalidRequestError
from paceline.limits import MAX_BRANCHES
from paceline.options import GenerateOptions, Stopping, check_option
from workers.drafting.kind import DRAFTERS
from workers.verification.rule import RULES, rule_named

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request speculates. `drafter`: a kind of drafter; None: any that fits the rule."""

    policy: str = "chain"
    window: int = 8
    rule: str = "coupled"
    branches: int = 1
    stopping: Stopping = Stopping.FIXED
    drafter: str | None = None
    merge: bool = False


def speculation_of(
    options: GenerateOptions, defaults: Speculation, deployed: Collection[str] = ()
) -> Speculation:
    """How a request with these options speculates, with the defaults filled in.

    `deployed`: kinds of drafters that a request may name although they are not registered here.
    Raises InvalidRequestError, which names the option, for unknown names and for options that do
    not fit together.
    """
    rule = RULES.get(_given(options.rule, defaults.rule), field="rule").name
    policy = policy_named(_given(options.policy, defaults.policy))
    window = _given(options.window, defaults.window)
    # Values that the caller left out yield to those that were given.
    most = min(window, most_branches(policy.name, rule))
    branches = _given(options.branches, min(defaults.branches, most))
    check_branches(rule, branches, window)
    check_policy_fits(policy.name, rule, branches)
    drafter = _given(options.drafter, defaults.drafter)
    if options.drafter is not None and options.drafter not in deployed:
        DRAFTERS.get(options.drafter, field="drafter")  # Raises if it is not registered.
    if options.stopping is not None:
        check_option("stopping", options.stopping)
    merge = _given(options.merge, defaults.merge and merges(rule))
    if merge:
        check_merge_alone(drafter)
    if options.merge and policy.drafts:
        check_merge(policy.name, rule, None)
    return Speculation(
        policy=policy.name,
        window=window,
        rule=rule,
        branches=branches,
        stopping=Stopping(_given(options.stopping, defaults.stopping.value)),
        drafter=drafter,
        merge=merge,
    )


def _given(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def check_deployment(
    speculation: Speculation,
    drafters: Mapping[str, Collection[str]] | None = None,
    *,
    num_drafters: int | None = None,
    num_groups: int = 1,
) -> None:
    """Raise InvalidRequestError if what is deployed cannot speculate like this.

    `drafters`: the deployed kinds, and the rules that each can draft for. `num_drafters`: how many
    are deployed, beside `num_groups` target groups. None: not known.
    """
    if num_drafters is not None:
        check_layout(speculation.policy, num_drafters, num_groups)
    if not policy_named(speculation.policy).drafts:
        return
    if speculation.drafter is not None and drafters is not None:
        check_deployed(speculation.drafter, drafters)
        drafters = {speculation.drafter: drafters[speculation.drafter]}
    elif speculation.drafter is not None and speculation.drafter in DRAFTERS:
        drafters = rules_by_kind([speculation.drafter])
    if drafters is not None:
        check_rule_fits(speculation.rule, drafters)
        if speculation.merge:
            check_merge(speculation.policy, speculation.rule, drafters)


def widest_proposal(speculation: Speculation) -> int:
    """The most candidates at one position, or paths, that a drafter may send."""
    return MAX_BRANCHES if policy_named(speculation.policy).fans_out else speculation.branches


def rules_by_kind(kinds: Iterable[str]) -> dict[str, frozenset[str]]:
    return {kind: DRAFTERS.get(kind, field="drafter").rules for kind in kinds}


def check_rule_fits(rule: str, drafters: Mapping[str, Collection[str]]) -> None:
    """Raise InvalidRequestError, naming rule and drafters, if no kind of drafter fits the rule.

    `drafters`: the rules that each kind can draft for. Without drafters nothing is drafted, which
    fits every rule.
    """
    if not drafters or any(rule in rules for rules in drafters.values()):
        return
    given = " and ".join(_candidates_of(kind, rule) for kind in sorted(drafters))
    needs = "needs draft probabilities and " if rule_named(rule).needs_draft_probs else ""
    fitting = " or ".join(repr(name) for name, kind in DRAFTERS.all().items() if rule in kind.rules)
    raise InvalidRequestError(
        "rule",
        f"the rule {rule!r} {needs}is not exact for {given}: choose another rule, or the "
        f"drafter {fitting}",
    )


def _candidates_of(kind: str, rule: str) -> str:
    """What a drafter proposes for a rule, in words. Its kind need not be registered here."""
    known = DRAFTERS.all().get(kind)
    made = "" if known is None else f"{known.candidates_for(rule).value} "
    return f"{made}candidates of the drafter {kind!r}"


def check_deployed(wanted: str, deployed: Collection[str]) -> None:
    """Raise InvalidRequestError if no drafter of the kind is deployed."""
    if wanted not in deployed:
        there = ", ".join(sorted(deployed)) or "none"
        raise InvalidRequestError(
            "drafter",
            f"no drafter of the kind {wanted!r} is deployed (there are: {there}); choose another, "
            "or add one to the configuration",
        )


def most_branches(policy: str, rule: str) -> int:
    """The most candidates at a position that policy and rule allow."""
    only_chains = rule_named(rule).chain_only or policy_named(policy).needs.chains_only
    return 1 if only_chains else MAX_BRANCHES


def check_policy_fits(policy: str, rule: str, branches: int) -> None:
    """Raise InvalidRequestError unless policy, rule and candidates a position fit together."""
    needs = policy_named(policy).needs
    if branches > 1 and needs.chains_only:
        raise InvalidRequestError(
            "branches",
            f"expected 1 for the policy {policy!r}, which drafts only chains, got "
            f"{branches}; choose another policy for trees",
        )
    if not needs.serve(rule):
        served = " or ".join(repr(one) for one in RULES if needs.serve(one))
        raise InvalidRequestError(
            "policy",
            f"the policy {policy!r} needs the rule {served}, whose verdicts a drafter can "
            f"foresee, got {rule!r}; choose another policy or rule",
        )


def check_layout(policy: str, num_drafters: int, num_groups: int) -> None:
    """Raise InvalidRequestError if the layout lacks what the policy needs."""
    needs = policy_named(policy).needs
    if num_groups < needs.groups:
        raise InvalidRequestError(
            "policy",
            f"the policy {policy!r} needs at least {needs.groups} target groups, and the "
            f"layout has {num_groups}: raise target.groups in the configuration, or choose another "
            "policy",
        )
    needed = needs.drafters
    if num_drafters < needed:
        raise InvalidRequestError(
            "policy",
            f"the policy {policy!r} needs at least {needed} drafters, and the layout has "
            f"{num_drafters}: raise the count of a drafter or add another one to the "
            "configuration, or choose another policy",
        )


def can_have(policy: str, num_drafters: int, num_groups: int) -> bool:
    needs = policy_named(policy).needs
    return num_drafters >= needs.drafters and num_groups >= needs.groups


def merges(rule: str) -> bool:
    """Whether candidates of several drafters may be siblings under the rule."""
    return not rule_named(rule).needs_draft_probs


def check_merge(policy: str, rule: str, drafters: Mapping[str, Collection[str]] | None) -> None:
    """Raise InvalidRequestError unless candidates of several drafters can be merged in one tree.

    `drafters`: the rules that each usable kind can draft for; None: not known.
    """
    if not merges(rule):
        merging = " and ".join(repr(one) for one in RULES if merges(one))
        given = "" if drafters is None else f" of {_named_together(drafters)}"
        raise InvalidRequestError(
            "merge",
            f"candidates{given} can be merged only under the rules {merging}, got "
            f"{rule!r}, which must know how a position's candidates were drawn together: "
            "choose another rule, or one drafter",
        )
    needs = policy_named(policy).needs
    if not needs.allow_merging:
        reason = "drafts only chains" if needs.chains_only else "shares out its drafters itself"
        drafting = [one for one in POLICIES.all().values() if one.drafts]
        others = [repr(one.name) for one in drafting if one.needs.allow_merging]
        raise InvalidRequestError(
            "merge",
            f"the policy {policy!r} cannot merge drafters, because it {reason}; choose "
            f"{' or '.join(others)}",
        )
    if drafters is None:
        return
    fitting = [kind for kind, rules in drafters.items() if rule in rules]
    if len(fitting) < 2:
        raise InvalidRequestError(
            "merge",
            f"drafters of at least two kinds must fit the rule {rule!r}, got "
            f"{_named_together(fitting) or 'none'}: add one of another kind to the configuration",
        )


def check_merge_alone(drafter: str | None) -> None:
    """Raise InvalidRequestError if a request to merge also names one kind of drafter."""
    if drafter is not None:
        raise InvalidRequestError(
            "merge", f"drafters of every kind are merged; leave out the drafter, got {drafter!r}"
        )


def _named_together(kinds: Iterable[str]) -> str:
    return " and ".join(repr(kind) for kind in sorted(kinds))


def check_branches(rule: str, branches: int, window: int) -> None:
    """Raise InvalidRequestError unless the rule takes `branches` candidates at a position."""
    if branches > 1 and rule_named(rule).chain_only:
        raise InvalidRequestError(
            "branches",
            f"expected 1 for the rule {rule!r}, which takes only chains, got {branches}; "
            "choose another rule for trees",
        )
    if branches > window:
        raise InvalidRequestError(
            "branches",
            f"expected at most the window, which is {window} candidates, got {branches}; "
            "widen the window",
        )
