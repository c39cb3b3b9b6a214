"""The coupled rule on a device's tensors gives the ids of the numpy rule, trees included."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from paceline.errors import InternalError
from paceline.sampling import SamplingParams, SequenceSpec
from workers.process import kernels
from workers.target.step_sequences import Candidates, VerdictTask
from workers.target.verdicts import device_verdicts
from workers.verification.candidates import CandidateTree
from workers.verification.choice import choose_token
from workers.verification.device_choice import ROWS_AT_ONCE, Row, choose_tokens, make_ready
from workers.verification.verify import verify

VOCAB = 509
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
END_IDS = (2, 0, VOCAB + 3)

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "coldest": SamplingParams(temperature=1e-40),
    "top-k": SamplingParams(top_k=5),
    "top-k beyond": SamplingParams(top_k=VOCAB + 1),
    "top-p": SamplingParams(top_p=0.6, temperature=1.5),
    "min-p": SamplingParams(min_p=0.05),
    "all cuts": SamplingParams(temperature=1.7, top_k=40, top_p=0.8, min_p=0.01),
    "penalties": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "encouraged": SamplingParams(
        temperature=0.0, repetition_penalty=0.7, presence_penalty=-1.0, frequency_penalty=-0.5
    ),
    "bias": SamplingParams(logit_bias={3: 4.0, 7: -100.0, 11: 3.6e38}, temperature=0.8),
    "bias and penalties": SamplingParams(
        logit_bias={3: 4.0, 5: 2.0}, repetition_penalty=1.5, frequency_penalty=0.2, top_p=0.9
    ),
    "min tokens": SamplingParams(min_tokens=3, temperature=0.6),
}
BAD_WORDS = ((7,), *((a, b) for a in range(6) for b in range(6) if (a + b) % 3 == 0), (5, 3, 4))


def spec_of(name: str, seed: int, prompt_length: int) -> SequenceSpec:
    return SequenceSpec(
        SAMPLINGS[name],
        seed=seed * 0x9E3779B97F4A7C15 % 2**64,
        prompt_length=prompt_length,
        sample_index=seed % 3,
        end_token_ids=END_IDS,
        bad_words=BAD_WORDS if name == "top-k beyond" else (),
    )


def random_logits(seed: int, num_rows: int, *, coarse: bool) -> torch.Tensor:
    """Float32 logits [R, V]. Coarse ones have many ties, like those of a bfloat16 LM head."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(num_rows, VOCAB, generator=generator) * 3
    logits_RV[:, 2] += 4.0
    return (logits_RV * 4).round() / 4 if coarse else logits_RV


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_the_numpy_rule(name: str, coarse: bool, device: str) -> None:
    rows, expected = [], []
    logits_RV = random_logits(3, 60, coarse=coarse)
    generator = random.Random(1)
    for seed in range(60):
        prefix = [generator.randrange(VOCAB) for _ in range(generator.randrange(2, 30))]
        spec = spec_of(name, seed, min(len(prefix), 5))
        rows.append(Row(spec, prefix))
        expected.append(choose_token(logits_RV[seed], spec, prefix))
    untouched = logits_RV.clone()
    token_ids_R, _ = choose_tokens(logits_RV.to(device), rows)
    assert token_ids_R.tolist() == expected
    assert torch.equal(logits_RV, untouched)


def test_rows_of_all_kinds_at_once() -> None:
    names = list(SAMPLINGS)
    rows = [Row(spec_of(name, i, 2), [5, 3, 5, 7]) for i, name in enumerate(names)]
    logits_RV = random_logits(9, len(rows), coarse=False)
    expected = [
        choose_token(logits_RV[i], row.spec, list(row.prefix)) for i, row in enumerate(rows)
    ]
    assert choose_tokens(logits_RV, rows)[0].tolist() == expected


def test_more_rows_than_are_chosen_at_once() -> None:
    count = 2 * ROWS_AT_ONCE + 3
    rows = [Row(spec_of("all cuts", i, 2), [5, 3, 5, 7]) for i in range(count)]
    logits_RV = random_logits(9, count, coarse=False)
    alone = [choose_tokens(logits_RV[i : i + 1], rows[i : i + 1]) for i in range(count)]
    token_ids_R, largest_R = choose_tokens(logits_RV, rows)
    assert token_ids_R.tolist() == [int(token_id) for token_id, _ in alone]
    assert largest_R.tolist() == [float(largest) for _, largest in alone]


def random_task(seed: int, name: str, rule: str = "coupled") -> VerdictTask:
    """A tree of distinct siblings from few tokens, so that many are accepted."""
    generator = random.Random(seed)
    parents: list[int] = []
    token_ids: list[int] = []
    taken: set[tuple[int, int]] = set()
    for index in range(generator.randrange(0, 12)):
        parent, token_id = generator.randint(0, index), generator.randrange(6)
        if len(taken | {(parent, token_id)}) == len(taken):
            parent, token_id = index, generator.randrange(6)
        taken.add((parent, token_id))
        parents.append(parent)
        token_ids.append(token_id)
    prefix = [generator.randrange(VOCAB) for _ in range(9)]
    tree = CandidateTree(tuple(token_ids), tuple(parents))
    spec = replace(spec_of(name, seed, 4), rule=rule)
    return VerdictTask(
        seed,
        spec,
        prefix,
        Candidates(tree),
        names_path=True,
        has_verdict=True,
        fed=(),
        top_tokens=[],
    )


def random_tasks(rules: tuple[str, ...]) -> tuple[list[VerdictTask], torch.Tensor]:
    names = list(SAMPLINGS)
    tasks = [
        random_task(seed, names[seed % len(names)], rules[seed % len(rules)]) for seed in range(84)
    ]
    count = sum(1 + len(task.candidates.tree) for task in tasks)
    logits_TV = random_logits(5, count, coarse=False)
    logits_TV[:, :6] += 7.0
    return tasks, logits_TV


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rules", [("coupled",), ("coupled", "one-hot")])
@pytest.mark.parametrize("skipped", [0, 3])
def test_verdicts_of_trees_are_those_of_the_numpy_rules(
    rules: tuple[str, ...], skipped: int, device: str
) -> None:
    """Rules that toss coins stand between coupled tasks, and get their own rows."""
    tasks, logits_TV = random_tasks(rules)
    logits_TV = torch.cat([logits_TV[:skipped], logits_TV])
    expected, spans, row = [], [], skipped
    for task in tasks:
        end = row + 1 + len(task.candidates.tree)
        tree = task.candidates.tree
        expected.append(verify(task.spec.rule, logits_TV[row:end], tree, task.spec, task.prefix))
        spans.append((row, end))
        row = end
    also = torch.arange(5, device=device)
    verdicts, copied = device_verdicts(logits_TV.to(device), tasks, spans, also)
    assert verdicts == expected
    assert copied is not None
    assert copied.tolist() == [0, 1, 2, 3, 4]
    # Some paths are long, so that rows of deep nodes decide.
    assert max(verdict.num_accepted for verdict in verdicts) >= 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_decide_must_be_numbers(bad: float) -> None:
    task = random_task(3, "plain")
    assert len(task.candidates.tree) > 2
    logits_RV = random_logits(1, 1 + len(task.candidates.tree), coarse=False)
    logits_RV[-1] = bad  # The last candidate is not accepted, so its row is not read.
    device_verdicts(logits_RV, [task], [(0, len(logits_RV))])
    logits_RV[0, ...] = bad
    with pytest.raises(InternalError):
        device_verdicts(logits_RV, [task], [(0, len(logits_RV))])


@pytest.mark.gpu
def test_what_is_ready_is_not_compiled_by_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows and any filters, each kernel keeps the one variant that it had."""
    monkeypatch.setattr(kernels, "_wanted", True)
    from workers.verification import choice_kernels

    def variants() -> dict[str, int]:
        kernels = {
            name: one for name, one in vars(choice_kernels).items() if name.endswith("_kernel")
        }
        return {
            name: sum(len(caches[0]) for caches in kernel.device_caches.values())
            for name, kernel in kernels.items()
        }

    wide = 4 * VOCAB
    make_ready(wide, torch.device("cuda"))
    before = variants()
    assert all(before.values()), before
    for count, name in ((1, "greedy"), (2, "plain"), (3, "cold"), (60, "all cuts")):
        rows = [Row(spec_of(name, seed, 2), [5, 3]) for seed in range(count)]
        choose_tokens(torch.randn(count, wide, device="cuda"), rows)
    assert variants() == before
