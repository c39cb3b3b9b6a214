"""Which rule fits which drafter: asked of a configuration at the start, and of each request."""

from __future__ import annotations

from collections.abc import Collection

from cluster.decoding.policies import PolicyName, policy_named
from paceline.errors import InvalidRequestError
from paceline.rules import DRAFTER_KINDS, MAX_BRANCHES, Rule
from workers.verification.rules import FACTS, CandidateKind

_DRAWN_BY_A_MODEL = {
    Rule.REJECTION: CandidateKind.SAMPLED_CHAIN,
    Rule.KSEQ: CandidateKind.INDEPENDENT_PATHS,
    Rule.RECURSIVE: CandidateKind.WITHOUT_REPLACEMENT,
    Rule.MCSD: CandidateKind.WITH_REPLACEMENT,
}


def candidate_kind(rule: Rule, drafter: str) -> CandidateKind:
    """What a drafter of that kind drafts for a rule: a model as the rule asks where it can."""
    if drafter != "model":
        return CandidateKind.DETERMINISTIC
    return _DRAWN_BY_A_MODEL.get(rule, CandidateKind.SHARED_NOISE)


def check_rule_fits(rule: Rule, drafters: Collection[str], *, field: str = "rule") -> None:
    """Raise InvalidRequestError, naming rule and drafters, where no kind of them fits the rule.

    Without drafters nothing is drafted, which fits every rule. `field`: what the caller calls it.
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
        field,
        f"the rule {rule.value!r} {needs}is not exact for {given}: choose another rule, or the "
        f"drafter {fitting}",
    )


def _fits(rule: Rule, drafter: str) -> bool:
    return candidate_kind(rule, drafter) in FACTS[rule].candidates


def check_deployed(wanted: str, deployed: Collection[str]) -> None:
    """Raise InvalidRequestError where no drafter of the kind is deployed."""
    if wanted not in deployed:
        there = ", ".join(sorted(deployed)) or "none"
        raise InvalidRequestError(
            "drafter",
            f"no drafter of the kind {wanted!r} is deployed (there are: {there}); choose another, "
            "or add one to the configuration",
        )


def most_branches(policy: PolicyName, rule: Rule) -> int:
    """How many candidates a position the policy and the rule take."""
    only_chains = FACTS[rule].chain_only or policy_named(policy).needs.chains_only
    return 1 if only_chains else MAX_BRANCHES


def check_policy_fits(policy: PolicyName, rule: Rule, branches: int) -> None:
    """Raise InvalidRequestError unless the policy can be had with this rule and such candidates."""
    needs = policy_named(policy).needs
    if branches > 1 and needs.chains_only:
        raise InvalidRequestError(
            "branches",
            f"expected 1 for the policy {policy.value!r}, which drafts chains alone, got "
            f"{branches}; choose another policy for trees",
        )
    if rule not in needs.rules:
        served = " or ".join(sorted(repr(one.value) for one in needs.rules))
        raise InvalidRequestError(
            "policy",
            f"the policy {policy.value!r} needs the rule {served}, whose verdicts a drafter can "
            f"foresee, got {rule.value!r}; choose another policy or rule",
        )


def check_layout(policy: PolicyName, num_drafters: int) -> None:
    """Raise InvalidRequestError where the layout lacks what the policy needs."""
    needed = policy_named(policy).needs.drafters
    if num_drafters < needed:
        raise InvalidRequestError(
            "policy",
            f"the policy {policy.value!r} shares work between at least {needed} drafters, and the "
            f"layout has {num_drafters}: raise the count of a drafter or add another one to the "
            "configuration, or choose the policy 'fanout'",
        )


def check_branches(rule: Rule, branches: int, window: int) -> None:
    """Raise InvalidRequestError unless the rule takes so many candidates a position."""
    if not 1 <= branches <= MAX_BRANCHES:
        raise InvalidRequestError("branches", f"expected 1 to {MAX_BRANCHES}, got {branches}")
    if branches > 1 and FACTS[rule].chain_only:
        raise InvalidRequestError(
            "branches",
            f"expected 1 for the rule {rule.value!r}, which takes chains alone, got {branches}; "
            "choose another rule for trees",
        )
    if branches > window:
        raise InvalidRequestError(
            "branches",
            f"expected at most the window, which is {window} candidates, got {branches}; "
            "widen the window",
        )
