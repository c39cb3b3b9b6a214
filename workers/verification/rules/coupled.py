"""Coupled verification: target and drafter share the noise of a position.

This is Gumbel coupling (Daliri et al. 2024). The token at a position is argmax(log target_probs +
noise): an exact sample of the target's distribution that depends only on the tokens before it and
on the request's seed. A candidate is accepted while it equals that token. So the text is that of
plain decoding, whatever was proposed.

The rule has no nodes of its own: `verify.follow` compares tokens, and `choice.py` draws them.
"""

from __future__ import annotations

from workers.verification.rule import RULES, CandidateKind, Promise, Rule

RULES.add(
    Rule(
        name="coupled",
        help="accepts what plain decoding would choose with the same seed",
        paper="Daliri et al. 2024 (Gumbel coupling)",
        promise=Promise.TEXT,
        exact_for=frozenset(CandidateKind),
        drawn_as=CandidateKind.SHARED_NOISE,
    )
)
