"""Checks that rule, policy and drafters fit together, for a configuration and for each request."""

from __future__ import annotations

from collections.abc import Collection

from cluster.decoding.lookahead import POLICIES, policy_named
from paceline.errors import InvalidRequestError
from paceline.rules import DRAFTER_KINDS, MAX_BRANCHES
from workers.verification.rule import RULES, CandidateKind, rule_named


def candidate_kind(rule: str, drafter: str) -> CandidateKind:
    """The kind of candidates that a drafter drafts for a rule.

    `drafter`: its kind. A model drafts as the rule asks, else with the target's noise.
    """
    if drafter != "model":
        return CandidateKind.DETERMINISTIC
    return rule_named(rule).drawn_as or CandidateKind.SHARED_NOISE


def check_rule_fits(rule: str, drafters: Collection[str], *, field: str = "rule") -> None:
    """Raise InvalidRequestError, naming rule and drafters, if no kind of drafter fits the rule.

    Without drafters nothing is drafted, which fits every rule. `field`: the caller's name for it.
    """
    if not drafters or any(_fits(rule, drafter) for drafter in drafters):
        return
    given = " and ".join(
        f"{candidate_kind(rule, drafter).value} candidates of the drafter {drafter!r}"
        for drafter in sorted(drafters)
    )
    needs = "needs draft probabilities and " if rule_named(rule).needs_draft_probs else ""
    fitting = " or ".join(repr(kind) for kind in DRAFTER_KINDS if _fits(rule, kind))
    raise InvalidRequestError(
        field,
        f"the rule {rule!r} {needs}is not exact for {given}: choose another rule, or the "
        f"drafter {fitting}",
    )


def _fits(rule: str, drafter: str) -> bool:
    return candidate_kind(rule, drafter) in rule_named(rule).exact_for


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
    """Whether the layout has what the policy needs."""
    needs = policy_named(policy).needs
    return num_drafters >= needs.drafters and num_groups >= needs.groups


def merges(rule: str) -> bool:
    """Whether candidates of several drafters may be siblings under the rule."""
    return not rule_named(rule).needs_draft_probs


def check_merge(policy: str, rule: str, kinds: Collection[str] | None) -> None:
    """Raise InvalidRequestError unless candidates of several drafters can be merged in one tree.

    `kinds`: of the usable drafters; None: not known.
    """
    if not merges(rule):
        merging = " and ".join(repr(one) for one in RULES if merges(one))
        given = "" if kinds is None else f" of {_named_together(kinds)}"
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
            f"the policy {policy!r} {reason}, so it merges nothing: choose {' or '.join(others)}",
        )
    if kinds is None:
        return
    fitting = [kind for kind in kinds if candidate_kind(rule, kind) in rule_named(rule).exact_for]
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


def _named_together(kinds: Collection[str]) -> str:
    return " and ".join(repr(kind) for kind in sorted(kinds))


def check_branches(rule: str, branches: int, window: int) -> None:
    """Raise InvalidRequestError unless the rule takes `branches` candidates at a position."""
    if not 1 <= branches <= MAX_BRANCHES:
        raise InvalidRequestError("branches", f"expected 1 to {MAX_BRANCHES}, got {branches}")
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
