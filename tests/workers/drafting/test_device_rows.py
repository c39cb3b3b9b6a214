"""Logits on a device and logits on the host lead to the same candidates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.errors import InternalError
from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import DEVICES, make_engine
from workers.drafting.chances import RankChances, coupled_prior, drawn_prior
from workers.drafting.draft_stopping import DrafterStopping, Stopper
from workers.drafting.growth import Growth
from workers.drafting.kinds.model import proposer
from workers.drafting.kinds.model.proposer import ModelProposer, expand_on_device
from workers.drafting.tree import ROOT, DraftTree, Grant
from workers.engine.cpu.engine import CpuEngine
from workers.engine.engine import Engine
from workers.verification.staging import to_host

Fed = tuple[DraftTree, Growth, int]
VOCAB = 331
KINDS = [
    ("coupled", 1, Stopping.FIXED, True),
    ("coupled", 1, Stopping.ADAEDL, False),
    ("coupled", 3, Stopping.FIXED, False),
    ("rejection", 1, Stopping.FIXED, False),
    ("kseq", 2, Stopping.FIXED, False),
    ("coupled", 1, Stopping.FIXED, True),
]
"""Rule, branches, stopping rule, and whether a token id alone is enough."""


def make_tree(seed: int, rule: str, branches: int, stopping: Stopping) -> DraftTree:
    sampling = SamplingParams(temperature=0.9, repetition_penalty=1.2, top_p=0.95)
    spec = SequenceSpec(sampling, seed=seed, prompt_length=4, rule=rule)
    tree = DraftTree(spec, [3, 1, 4, 1, 5 + seed], max_position=100, stopping=stopping)
    tree.set_grant(Grant(until_position=20, branches=branches, nodes=15))
    return tree


def make_growths() -> list[tuple[DraftTree, Growth, int]]:
    fed = []
    for seed, (rule, branches, stopping, token_alone) in enumerate(KINDS):
        tree = make_tree(seed, rule, branches, stopping)
        prior = coupled_prior if rule == "coupled" else drawn_prior
        growth = Growth(tree, RankChances(prior), Stopper(stopping, DrafterStopping()))
        assert growth.to_feed(pass_ms=1.0) == [ROOT]
        assert growth.needs_token_alone == token_alone
        fed.append((tree, growth, ROOT))
    return fed


def harvest(fed: list[tuple[DraftTree, Growth, int]]) -> list[tuple[object, ...]]:
    new = [growth.harvest([ROOT], pass_ms=1.0) for _, growth, _ in fed]
    return [(one.token_ids, one.parents, one.multiplicities) for one in new]


@pytest.mark.parametrize("device", DEVICES)
def test_candidates_are_those_that_the_host_draws(device: str) -> None:
    logits_TV = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    expected, found = make_growths(), make_growths()
    for row, (_, growth, node) in enumerate(expected):
        growth.expand(node, logits_TV[row])
    expand_on_device(logits_TV.to(device), found)
    assert harvest(found) == harvest(expected)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.4),
    ],
    ids=["plain", "greedy", "top-k", "top-p"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_of_a_tree_only_candidates_leave_the_device(
    device: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their order and their gaps, which decide what is fed next, are those of the host."""
    grants = [
        Grant(until_position=20, branches=3, nodes=15),
        Grant(until_position=20, branches=1, nodes=15, fan_out=4),
    ]
    logits_TV = torch.randn(len(grants), VOCAB, generator=torch.Generator().manual_seed(5)) * 4
    expected: list[Fed] = []
    found: list[Fed] = []
    for fed in (expected, found):
        for number, grant in enumerate(grants):
            spec = SequenceSpec(sampling, seed=number, prompt_length=4)
            tree = DraftTree(spec, [3, 1, 4, 1, 5], max_position=100, stopping=Stopping.FIXED)
            tree.set_grant(grant)
            stopper = Stopper(Stopping.FIXED, DrafterStopping())
            growth = Growth(tree, RankChances(coupled_prior), stopper)
            assert growth.to_feed(pass_ms=1.0) == [ROOT]
            assert growth.needs_best_tokens
            fed.append((tree, growth, ROOT))
    for row, (_, growth, node) in enumerate(expected):
        growth.expand(node, logits_TV[row])
    copied: list[torch.Tensor] = []

    def counting(*tensors: torch.Tensor) -> list[torch.Tensor]:
        copied.extend(tensors)
        return to_host(*tensors)

    monkeypatch.setattr(proposer, "to_host", counting)
    assert expand_on_device(logits_TV.to(device), found) == []
    assert sum(one.numel() for one in copied) <= len(grants) * (1 + 3 * 4)
    for (_, one, _), (_, other, _) in zip(expected, found, strict=True):
        children, drawn = (growth._drawn.of[ROOT].children for growth in (one, other))
        assert drawn.token_ids == children.token_ids
        assert drawn.gaps == pytest.approx(children.gaps, rel=1e-5)
    assert harvest(found) == harvest(expected)


def test_logits_that_decide_must_be_numbers() -> None:
    """If they are NaN, only that tree fails."""
    logits_TV = torch.zeros(len(KINDS), VOCAB)
    logits_TV[0, 7] = float("nan")
    growths = make_growths()
    ((tree, error),) = expand_on_device(logits_TV, growths)
    assert tree is growths[0][0]
    assert isinstance(error, InternalError)


@pytest.mark.parametrize("device", DEVICES)
def test_targets_may_have_different_vocabularies(device: str) -> None:
    """In one pass, each tree's draws use its own target's token ids."""
    logits_TV = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(2))
    expected, found = make_growths(), make_growths()
    for growths in (expected, found):
        for number, (tree, _, _) in enumerate(growths):
            tree.vocab_size = (None, 40)[number % 2]
    for row, (_, growth, node) in enumerate(expected):
        growth.expand(node, logits_TV[row])
    assert expand_on_device(logits_TV.to(device), found) == []
    drawn = harvest(found)
    assert drawn == harvest(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_drafter_on_the_gpu_engine_drafts_as_on_the_cpu_engine(
    device: str, tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    engines: list[Engine] = [
        CpuEngine(folder, weights="float32", threads=1, kv_memory_bytes=1 << 20),
        make_engine(folder, device),
    ]
    drafted = []
    for engine in engines:
        drafter = ModelProposer(engine)
        trees = [make_tree(seed, *kind[:3]) for seed, kind in enumerate(KINDS)]
        for tree in trees:
            drafter.open(tree)
        for _ in range(5):
            for draft in drafter.run_pass(trees, pass_ms=1.0).drafts:
                draft.tree.extend(draft.new)
        drafter.check_integrity(trees)
        drafted.append([(tree.tokens, tree.parents) for tree in trees])
        assert sum(tree.num_nodes for tree in trees) >= 20
    assert drafted[0] == drafted[1]
