"""Pure arithmetic that decides which candidates are accepted. Logits in, a Verdict out.

Nothing here reads a clock or draws a random number: the noise is a function of the request's seed
and of the position. Begin with `verify.verify`. `rules/` has a file for each rule,
`rule.py` says what a rule is, and docs/rules.md explains them.

Shapes in names: T rows of a chain, R rows of a tree (row n follows node n), V vocabulary, N a
subset of the vocabulary, M tokens of a draft distribution, P tokens of a prefix, D depths.

A drafter's chain of two tokens after the prompt [3], verified by rejection:

>>> import torch
>>> from paceline.sampling import SamplingParams, SequenceSpec
>>> from workers.verification.candidates import CandidateTree
>>> from workers.verification.candidates import DraftProbs
>>> from workers.verification.draws import cut_draft_probs, draw_chain_token
>>> from workers.verification.verify import verify
>>> spec = SequenceSpec(SamplingParams(temperature=1.0), seed=7, prompt_length=1)
>>> draft_logits_V = torch.tensor([0.0, 2.0, 1.0, 0.5])
>>> cut = cut_draft_probs(draft_logits_V, spec, [3])
>>> chain = [draw_chain_token(cut, spec, position) for position in (1, 2)]
>>> target_logits_RV = torch.tensor([[0.0, 2.0, 1.0, 0.0]] * 3)
>>> verdict = verify(
...     "rejection",
...     target_logits_RV,
...     CandidateTree.chain(chain),
...     spec,
...     [3],
...     DraftProbs({0: cut, 1: cut}),
... )
>>> committed = [*chain[: verdict.num_accepted], verdict.token_id]

The coupled rule needs no draft probabilities. It gives the same tokens as without candidates:

>>> from workers.verification.choice import choose_token
>>> first = choose_token(target_logits_RV[0], spec, [3])
>>> tree = CandidateTree(token_ids=(first, 0), parents=(0, 1))
>>> verdict = verify("coupled", target_logits_RV, tree, spec, [3])
>>> verdict.accepted[:1] == (0,)
True
>>> path = [3, *tree.tokens_of(verdict.accepted)]
>>> verdict.token_id == choose_token(target_logits_RV[0], spec, path)
True
"""

from __future__ import annotations

__all__ = [
    "candidates",
    "choice",
    "choice_kernels",
    "device_choice",
    "distribution",
    "draws",
    "grammars",
    "noise",
    "prefix",
    "rule",
    "staging",
    "structure",
    "verify",
]
