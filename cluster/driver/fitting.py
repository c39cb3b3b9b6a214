"""How a request speculates, and whether its policy, rule and drafters fit together.

The driver asks for each request, the configuration for its defaults, and commands for their flags.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from cluster.decoding.policies import PolicyName, policy_named
from paceline.errors import InvalidRequestError
from paceline.options import GenerateOptions
from paceline.rules import DRAFTER_KINDS, MAX_BRANCHES, Rule, Stopping
from workers.verification.rules import FACTS, CandidateKind

_DRAWN_BY_A_MODEL = {
    Rule.REJECTION: CandidateKind.SAMPLED_CHAIN,
    Rule.KSEQ: CandidateKind.INDEPENDENT_PATHS,
    Rule.RECURSIVE: CandidateKind.WITHOUT_REPLACEMENT,
    Rule.MCSD: CandidateKind.WITH_REPLACEMENT,
}


ValueT = TypeVar("ValueT")
NameT = TypeVar("NameT", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request speculates. `drafter`: a kind of drafter; None: any that fits the rule."""

    policy: PolicyName = PolicyName.CHAIN
    window: int = 8
    rule: Rule = Rule.COUPLED
    branches: int = 1
    stopping: Stopping = Stopping.FIXED
    drafter: str | None = None
    merge: bool = False


def speculation_of(options: GenerateOptions, defaults: Speculation) -> Speculation:
    """How a request with these options speculates, with the defaults filled in.

    Raises InvalidRequestError, which names the option, if they do not fit together.
    """
    rule = _named(Rule, "rule", options.rule, defaults.rule)
    policy = _named(PolicyName, "policy", options.policy, defaults.policy)
    window = _given(options.window, defaults.window)
    # Values that the caller left out yield to those that were given.
    most = min(window, most_branches(policy, rule))
    branches = _given(options.branches, min(defaults.branches, most))
    check_branches(rule, branches, window)
    check_policy_fits(policy, rule, branches)
    drafter = _given(options.drafter, defaults.drafter)
    if drafter is not None and drafter not in DRAFTER_KINDS:
        known = ", ".join(DRAFTER_KINDS)
        raise InvalidRequestError("drafter", f"expected one of {known}, got {drafter!r}")
    merge = _given(options.merge, defaults.merge and rule in MERGING_RULES)
    if merge:
        check_merge_alone(drafter)
    if options.merge and policy is not PolicyName.OFF:
        check_merge(policy, rule, None)
    return Speculation(
        policy=policy,
        window=window,
        rule=rule,
        branches=branches,
        stopping=_named(Stopping, "stopping", options.stopping, defaults.stopping),
        drafter=drafter,
        merge=merge,
    )


def _named(kind: type[NameT], field: str, name: str | None, default: NameT) -> NameT:
    """The member of an enum with this name. Raises InvalidRequestError."""
    if name is None:
        return default
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(one.value for one in kind)
        raise InvalidRequestError(field, f"expected one of {known}, got {name!r}") from None


def _given(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def check_deployment(
    speculation: Speculation,
    drafters: Collection[str] | None = None,
    *,
    num_drafters: int | None = None,
    num_groups: int = 1,
) -> None:
    """Raise InvalidRequestError if what is deployed cannot speculate like this.

    `drafters`: the deployed kinds; `num_drafters`: how many are deployed, beside `num_groups`
    target groups. None: not known.
    """
    if num_drafters is not None:
        check_layout(speculation.policy, num_drafters, num_groups)
    if speculation.policy is PolicyName.OFF:
        return
    kinds = drafters
    if speculation.drafter is not None:
        kinds = {speculation.drafter}
        if drafters is not None:
            check_deployed(speculation.drafter, drafters)
    if kinds is not None:
        check_rule_fits(speculation.rule, kinds)
        if speculation.merge:
            check_merge(speculation.policy, speculation.rule, kinds)


def widest_proposal(speculation: Speculation) -> int:
    """The most candidates at one position, or k-SEQ paths, that a drafter may send."""
    return MAX_BRANCHES if policy_named(speculation.policy).fans_out else speculation.branches


def candidate_kind(rule: Rule, drafter: str) -> CandidateKind:
    """The kind of candidates that a drafter drafts for a rule.

    `drafter`: its kind. A model drafts as the rule asks.
    """
    if drafter != "model":
        return CandidateKind.DETERMINISTIC
    return _DRAWN_BY_A_MODEL.get(rule, CandidateKind.SHARED_NOISE)


def check_rule_fits(rule: Rule, drafters: Collection[str]) -> None:
    """Raise InvalidRequestError, naming rule and drafters, if no kind of drafter fits the rule.

    Without drafters nothing is drafted, which fits every rule.
    """
    if not drafters or any(_fits(rule, drafter) for drafter in drafters):
        return
    given = " and ".join(
        f"{candidate_kind(rule, drafter).value} candidates of the drafter {drafter!r}"
        for drafter in sorted(drafters)
    )
    needs = "needs draft probabilities and " if FACTS[rule].needs_draft_probs else ""
    fitting = " or ".join(repr(kind) for kind in DRAFTER_KINDS if _fits(rule, kind))
    raise InvalidRequestError(
        "rule",
        f"the rule {rule.value!r} {needs}is not exact for {given}: choose another rule, or the "
        f"drafter {fitting}",
    )


def _fits(rule: Rule, drafter: str) -> bool:
    return candidate_kind(rule, drafter) in FACTS[rule].candidates


def check_deployed(wanted: str, deployed: Collection[str]) -> None:
    """Raise InvalidRequestError if no drafter of the kind is deployed."""
    if wanted not in deployed:
        there = ", ".join(sorted(deployed)) or "none"
        raise InvalidRequestError(
            "drafter",
            f"no drafter of the kind {wanted!r} is deployed (there are: {there}); choose another, "
            "or add one to the configuration",
        )


def most_branches(policy: PolicyName, rule: Rule) -> int:
    """The most candidates at a position that policy and rule allow."""
    only_chains = FACTS[rule].chain_only or policy_named(policy).needs.chains_only
    return 1 if only_chains else MAX_BRANCHES


def check_policy_fits(policy: PolicyName, rule: Rule, branches: int) -> None:
    """Raise InvalidRequestError unless policy, rule and candidates a position fit together."""
    needs = policy_named(policy).needs
    if branches > 1 and needs.chains_only:
        raise InvalidRequestError(
            "branches",
            f"expected 1 for the policy {policy.value!r}, which drafts only chains, got "
            f"{branches}; choose another policy for trees",
        )
    if rule not in needs.rules:
        served = " or ".join(sorted(repr(one.value) for one in needs.rules))
        raise InvalidRequestError(
            "policy",
            f"the policy {policy.value!r} needs the rule {served}, whose verdicts a drafter can "
            f"foresee, got {rule.value!r}; choose another policy or rule",
        )


def check_layout(policy: PolicyName, num_drafters: int, num_groups: int) -> None:
    """Raise InvalidRequestError if the layout lacks what the policy needs."""
    needs = policy_named(policy).needs
    if num_groups < needs.groups:
        raise InvalidRequestError(
            "policy",
            f"the policy {policy.value!r} needs at least {needs.groups} target groups, and the "
            f"layout has {num_groups}: raise target.groups in the configuration, or choose the "
            "policy 'fanout'",
        )
    needed = needs.drafters
    if num_drafters < needed:
        raise InvalidRequestError(
            "policy",
            f"the policy {policy.value!r} needs at least {needed} drafters, and the layout has "
            f"{num_drafters}: raise the count of a drafter or add another one to the "
            "configuration, or choose the policy 'fanout'",
        )


def can_have(policy: PolicyName, num_drafters: int, num_groups: int) -> bool:
    """Whether the layout has what the policy needs."""
    needs = policy_named(policy).needs
    return num_drafters >= needs.drafters and num_groups >= needs.groups


MERGING_RULES = (Rule.COUPLED, Rule.ONE_HOT)
"""Rules under which candidates of several drafters may be siblings."""


def check_merge(policy: PolicyName, rule: Rule, kinds: Collection[str] | None) -> None:
    """Raise InvalidRequestError unless candidates of several drafters can be merged in one tree.

    `kinds`: of the usable drafters; None: not known.
    """
    if rule not in MERGING_RULES:
        given = "" if kinds is None else f" of {_named_together(kinds)}"
        raise InvalidRequestError(
            "merge",
            f"candidates{given} can be merged only under the rules 'coupled' and 'one-hot', got "
            f"{rule.value!r}, which must know how a position's candidates were drawn together: "
            "choose another rule, or one drafter",
        )
    needs = policy_named(policy).needs
    if needs.chains_only or needs.drafters > 1:
        reason = "drafts only chains" if needs.chains_only else "shares out its drafters itself"
        raise InvalidRequestError(
            "merge",
            f"the policy {policy.value!r} {reason}, so it merges nothing: choose 'chain', "
            "'lockstep', 'fanout' or 'auto'",
        )
    if kinds is None:
        return
    fitting = [kind for kind in kinds if candidate_kind(rule, kind) in FACTS[rule].candidates]
    if len(fitting) < 2:
        raise InvalidRequestError(
            "merge",
            f"drafters of at least two kinds must fit the rule {rule.value!r}, got "
            f"{_named_together(fitting) or 'none'}: add one of another kind to the configuration",
        )


def check_merge_alone(drafter: str | None) -> None:
    """Raise InvalidRequestError if a request to merge also names one kind of drafter."""
    if drafter is not None:
        raise InvalidRequestError(
            "merge", f"drafters of every kind are merged; leave out the drafter, got {drafter!r}"
        )


def _named_together(kinds: Collection[str]) -> str:
    return " and ".join(repr(kind) for kind in sorted(kinds))


def check_branches(rule: Rule, branches: int, window: int) -> None:
    """Raise InvalidRequestError unless the rule takes `branches` candidates at a position."""
    if branches > 1 and FACTS[rule].chain_only:
        raise InvalidRequestError(
            "branches",
            f"expected 1 for the rule {rule.value!r}, which takes only chains, got {branches}; "
            "choose another rule for trees",
        )
    if branches > window:
        raise InvalidRequestError(
            "branches",
            f"expected at most the window, which is {window} candidates, got {branches}; "
            "widen the window",
        )
