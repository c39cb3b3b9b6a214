"""Distilling: networks, masks, samples, runs that go on, and what each error says."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import CheckpointError, ConfigError
from tests.tiny import make_tiny_checkpoint
from workers.distillation.network import evenly_spaced, read_network, student_of
from workers.distillation.run import Distillation, Recipe
from workers.distillation.sampling import Prompts, sample_rows
from workers.distillation.training import Masks, Rows, Trainer, TrainingSettings, losses_of
from workers.engine.cpu.engine import UNLIKELY
from workers.engine.load.checkpoint import DRAFT_TOKENS
from workers.engine.open import open_engine
from workers.engine.slices import Slice
from workers.models.learned import assemble, embedding_digest, read_learned, write_learned
from workers.process.atomic_files import replaced_folder

PROMPTS = [[2, 1], [1, 40, 50, 60], [1, 70, 80], [90, 91, 92, 93, 94], [1, 33]]
ASKS = [False, False, False, False, True]
ENDS = (2, 0)
RECIPE = Recipe(
    sample_seconds=0.0,
    train_seconds=3.0,
    layers=2,
    head=300,
    num_positions=32,
    round_tokens=512,
    batch_tokens=256,
    rate=5e-3,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", num_layers=4)


def distillation(target: Path, work: Path, recipe: Recipe, told: list[str]) -> Distillation:
    return Distillation(target, work, recipe, ENDS, told.append)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_network_has_the_logits_of_transformers(
    architecture: Any, tied: bool, tmp_path: Path
) -> None:
    make_tiny_checkpoint(tmp_path, architecture=architecture, tie_word_embeddings=tied)
    tokens = torch.randint(0, 384, (3, 20), generator=torch.Generator().manual_seed(1))
    network = read_network(tmp_path, torch.float32)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
        logits = network(tokens) @ network.head_VF.T
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_other_architectures_and_windows_are_refused(tmp_path: Path) -> None:
    for architecture, reason in (("gemma2", "gemma2"), ("mistral", "sliding window")):
        folder = make_tiny_checkpoint(tmp_path / reason, architecture=architecture)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=reason):
            read_network(folder, torch.float32)


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert evenly_spaced(5, 30) == [0, 7, 14, 22, 29]
    assert evenly_spaced(1, 30) == [0]


def test_a_mask_sees_what_it_sees_when_it_drafts(target: Path) -> None:
    """The row of a mask among many is that of the text up to its anchor, with its masks alone."""
    student = student_of(read_network(target, torch.float32), [0, 3], masks=True)
    tokens = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(2))
    masks = Masks.drawn(24, 4, np.random.default_rng(3), torch.device("cpu"))
    anchors = masks.places_M - (masks.seen_SS[24:].sum(1) - 1 - masks.places_M).abs()
    num_masks = len(masks.places_M)
    with torch.no_grad():
        rows = student(tokens, masks.positions_S, masks.seen_SS, num_masks)[:, 24:]
        depths = masks.seen_SS[24:, 24:].sum(1)  # a mask sees those of its anchor up to itself
        assert set(depths.tolist()) == {1, 2, 3}
        for place, depth, row in zip(
            masks.places_M.tolist(), depths.tolist(), rows.unbind(1), strict=True
        ):
            anchor = place - depth
            alone = student(tokens[:, : anchor + 1], None, None, depth)[:, -1]
            torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-5)
    assert len(anchors) == num_masks


def test_losses_are_zero_for_the_target_itself_and_name_what_they_measure() -> None:
    generator = torch.Generator().manual_seed(4)
    head, wanted = torch.randn(9, 6, generator=generator), torch.randn(5, 6, generator=generator)
    other = torch.randn(5, 6, generator=generator)
    p, q = (wanted @ head.T).softmax(-1), (other @ head.T).softmax(-1)
    lean = torch.tensor(0.25)
    by_name = {
        name: losses_of(other, wanted, head, name, lean)
        for name in ("forward", "reverse", "variation", "mixed")
    }
    forward = (p * (p / q).log()).sum(-1)
    variation = (p - q).abs().sum(-1) / 2
    missed = 1 - q[torch.arange(5), p.argmax(-1)]
    torch.testing.assert_close(by_name["forward"][0], forward)
    torch.testing.assert_close(by_name["reverse"][0], (q * (q / p).log()).sum(-1))
    torch.testing.assert_close(by_name["variation"][0], variation)
    mixed = 0.75 * forward + 0.25 * (variation + missed)
    torch.testing.assert_close(by_name["mixed"][0], mixed)
    _, agrees, overlap = by_name["mixed"]
    assert agrees.tolist() == (p.argmax(-1) == q.argmax(-1)).float().tolist()
    torch.testing.assert_close(overlap, torch.minimum(p, q).sum(-1))
    same, agrees, _ = losses_of(wanted, wanted, head, "forward", lean)
    assert same.abs().max() < 1e-5
    assert agrees.all()


def test_greedy_rows_are_the_targets_own_text_and_prompts_are_given(target: Path) -> None:
    network = read_network(target, torch.float32)
    prompts = Prompts.of(PROMPTS, ASKS, torch.device("cpu"))
    temperatures = torch.tensor([0.0] * 6 + [1.0] * 6)
    tokens, own = sample_rows(
        network, prompts, temperatures, 96, ENDS, torch.Generator().manual_seed(5)
    )
    assert tokens.shape == own.shape == (12, 96)
    with torch.no_grad():
        best = (network(torch.from_numpy(tokens).long()) @ network.head_VF.T).argmax(-1).numpy()
    asked = 0
    for row in range(6):
        begin = next(one for one in PROMPTS if tokens[row, : len(one)].tolist() == one)
        assert not own[row, : len(begin)].any()
        if begin == PROMPTS[4]:
            asked += 1  # the question is at temperature 1
        else:
            first = slice(len(begin), 64)
            mine = own[row, first]
            assert (tokens[row, first] == best[row, len(begin) - 1 : 63])[mine].all()
    assert asked < 6
    drawn = own[6:, 1:] & (tokens[6:, 1:] != best[6:, :-1])
    assert drawn.any(), "at temperature 1 other tokens are drawn too"


def test_a_run_learns_goes_on_and_makes_a_drafter(target: Path, tmp_path: Path) -> None:
    told: list[str] = []
    recipe = replace(RECIPE, parallel_seconds=1.0, candidates=3)
    learned = distillation(target, tmp_path / "work", recipe, told).run(PROMPTS, ASKS)
    assert learned == tmp_path / "work" / "parallel"
    tensors, description = read_learned(tmp_path / "work" / "chain")
    assert description["progress"]["steps"] > 5
    assert len(description["acceptance"]["greedy"]) == 8
    assert len(description["head"]) == 300
    before = student_of(read_network(target, torch.float32), [0, 3])
    moved = float((tensors["norm.weight"] - before.norm.weight.detach()).abs().max())
    assert moved > 0.001, "training changed nothing"
    # With more time it goes on from where it was; answers are not sampled again.
    killed = tmp_path / "work" / "answers" / ".0.safetensors.0123abcd.part"
    killed.write_bytes(b"half")
    told.clear()
    spent = description["progress"]["seconds"]  # the last step may take long
    longer = replace(recipe, train_seconds=spent + 0.5)
    distillation(target, tmp_path / "work", longer, told).run(PROMPTS, ASKS)
    assert any("going on at step" in line for line in told)
    assert not any("sampled" in line for line in told)
    assert not killed.exists()
    more = read_learned(tmp_path / "work" / "chain")[1]["progress"]["steps"]
    assert more > description["progress"]["steps"]

    out = tmp_path / "drafter"
    with replaced_folder(out) as into:
        assemble(target, tmp_path / "work" / "chain", into)
    tokens = torch.arange(10, 22)[None]
    tensors, description = read_learned(tmp_path / "work" / "chain")
    student = student_of(read_network(target, torch.float32), description["layers"])
    student.load_state_dict(tensors)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        logits = model(tokens).logits[0]
        expected = student(tokens)[0] @ student.head_VF.T
    scale = float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.01 * scale)
    # As a drafter it proposes the chosen tokens only; as a target it has all logits.
    for drafts in (True, False):
        engine = open_engine(
            out, weights="float32", threads=1, kv_memory_bytes=1 << 22, device="cpu", drafts=drafts
        )
        rows = engine.step([Slice(range(2), 0, tokens[0].tolist(), 12)])
        chosen = torch.tensor(description["head"])
        torch.testing.assert_close(rows[:, chosen], logits[:, chosen], rtol=1e-3, atol=1e-4 * scale)
        others = torch.ones(384, dtype=torch.bool)
        others[chosen] = False
        assert bool((rows[:, others] == UNLIKELY).all()) is drafts

    parallel = tmp_path / "parallel"
    with replaced_folder(parallel) as into:
        assemble(target, learned, into)
    config = json.loads((parallel / "config.json").read_text())
    mask, told_of = config["pard_token"], read_learned(learned)[1]
    assert mask == told_of["mask_token"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(parallel)
    embedding = loaded.get_input_embeddings().weight
    torch.testing.assert_close(
        embedding[mask].float(), read_learned(learned)[0]["mask"], rtol=1e-3, atol=1e-3
    )


def test_training_raises_the_agreement_with_the_target(target: Path) -> None:
    network = read_network(target, torch.float32).requires_grad_(False)
    student = student_of(network, [0, 1])
    generator = torch.Generator().manual_seed(6)
    rows = Rows(
        torch.randint(0, 384, (64, 32), generator=generator), torch.ones(64, 32, dtype=torch.bool)
    )
    settings = TrainingSettings(seconds=1e9, rate=5e-3, batch_tokens=512)
    trainer = Trainer(network, student, network.head_VF, settings)
    batch = Rows(rows.token_ids_BS[:16], rows.own_BS[:16])
    # At the start of such a long run the rate would still rise.
    trainer.progress.seconds = 0.1e9
    first = trainer.step(batch)
    for start in range(0, 640, 16):
        part = slice(start % 64, start % 64 + 16)
        trainer.step(Rows(rows.token_ids_BS[part], rows.own_BS[part]))
    last = trainer.step(batch)
    assert first is not None
    assert last is not None
    assert last[0] < 0.8 * first[0], "the loss falls"
    assert last[2] > first[2], "the overlap rises"


def test_what_does_not_fit_is_refused(target: Path, tmp_path: Path) -> None:
    told: list[str] = []
    for wrong, reason in (
        ({"layers": 4}, "a student is smaller"),
        ({"head": 385}, "target's 384 tokens"),
        ({"num_positions": 4096}, "half of the target's positions"),
        ({"loss": "best"}, "loss must be one of"),
    ):
        with pytest.raises(ConfigError, match=reason):
            distillation(target, tmp_path / "work", replace(RECIPE, **wrong), told)
    run = distillation(target, tmp_path / "work", RECIPE, told)
    for prompts in ([[1]], [[1], [384]]):
        with pytest.raises(ConfigError, match="token ids below the target's 384"):
            run.run(prompts, [False] * len(prompts))
    other = make_tiny_checkpoint(tmp_path / "other", num_layers=4, seed=1)
    with pytest.raises(ConfigError, match="other values of target"):
        distillation(other, tmp_path / "work", RECIPE, told)


def test_a_drafter_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    network = read_network(target, torch.float32)
    told = {"target": embedding_digest(network.embedding_VF), "layers": [0], "head": [1, 2]}
    tensors = student_of(network, [0]).state_dict()
    write_learned(tmp_path / "learned", tensors, told)
    other = make_tiny_checkpoint(tmp_path / "other", num_layers=4, seed=1)
    with (
        pytest.raises(CheckpointError, match="from another target"),
        replaced_folder(tmp_path / "out") as into,
    ):
        assemble(other, tmp_path / "learned", into)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="no whole folder"):
        assemble(target, tmp_path / "absent", tmp_path)


def test_eight_bits_keep_a_row_within_half_a_step(target: Path, tmp_path: Path) -> None:
    tensors = student_of(read_network(target, torch.float32), [0, 1]).state_dict()
    write_learned(tmp_path / "learned", tensors, {})
    found, _ = read_learned(tmp_path / "learned")
    for name, tensor in tensors.items():
        step = tensor.abs().amax(-1, keepdim=True) / 127
        bound = 0.51 * step if tensor.dim() == 2 else tensor.abs() * 2**-10
        assert ((found[name] - tensor).abs() <= bound + 1e-9).all(), name


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_was_good(
    target: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    distillation(target, tmp_path, RECIPE, told).run(PROMPTS, ASKS)
    good = (tmp_path / "chain.pt").read_bytes()
    state = torch.load(tmp_path / "chain.pt")
    state["student"]["norm.weight"][0] = float("nan")
    torch.save(state, tmp_path / "chain.pt")
    broken = (tmp_path / "chain.pt").read_bytes()
    learned = (tmp_path / "chain" / "learned-1.safetensors").read_bytes()
    longer = replace(RECIPE, train_seconds=RECIPE.train_seconds + 30)
    with pytest.raises(ConfigError, match="not finite in 10 steps"):
        distillation(target, tmp_path, longer, told).run(PROMPTS, ASKS)
    assert (tmp_path / "chain.pt").read_bytes() == broken != good
    assert (tmp_path / "chain" / "learned-1.safetensors").read_bytes() == learned


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_what_was_saved_before(target: Path, tmp_path: Path) -> None:
    told: list[str] = []
    distillation(target, tmp_path, RECIPE, told).run(PROMPTS, ASKS)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    longer = replace(RECIPE, train_seconds=RECIPE.train_seconds + 0.5)
    with no_file_above(20_000), pytest.raises(ConfigError, match="free space"):
        distillation(target, tmp_path, longer, told).run(PROMPTS, ASKS)
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert now == files
    distillation(target, tmp_path, longer, told).run(PROMPTS, ASKS)
    assert any("going on" in line for line in told)


def test_broken_lists_of_draft_tokens_are_refused(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path)
    for text, reason in (
        ("[", "not readable JSON"),
        ("{}", "a list of token ids"),
        ("[1, 1]", "without repetition"),
        ("[384]", "from 0 to 383"),
    ):
        (tmp_path / DRAFT_TOKENS).write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            open_engine(
                tmp_path,
                weights="float32",
                threads=1,
                kv_memory_bytes=1 << 22,
                device="cpu",
                drafts=True,
            )
