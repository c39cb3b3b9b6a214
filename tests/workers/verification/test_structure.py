"""Structures: masks after any prefix and path, the laws of rules under them, what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.errors import InternalError, InvalidRequestError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.structure import Structure
from tests.tiny import make_tiny_tokenizer
from tests.workers.verification.enumeration import (
    Prefix,
    TinyModels,
    committed_law,
    drawn_chains,
    is_exact,
    rule_node,
    unordered_trees,
)
from tests.workers.verification.remainders import Remainders
from workers.verification.candidates import CandidateTree, SparseProbs
from workers.verification.choice import choose_token
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.distribution import WindowRows, probabilities_of
from workers.verification.draws import cut_draft_probs, top_children
from workers.verification.grammars import _LIMITS, FREE_MASKS, Grammars
from workers.verification.prefix import CountedText
from workers.verification.prefix import Prefix as TextPrefix
from workers.verification.rule import RULES, rule_named
from workers.verification.structure import Follower
from workers.verification.verify import verify

ENDS = (2, 0)
PADDED = 400
"""The model's number of logits, more than the tokenizer's 384 tokens."""
SOME = Structure.regex("[a-z]{2,5}(, [a-z]{2,5})*")


PROMPT = 1
"""The one token before the outputs of the tiny models."""


def _spec(rule: str = "coupled", temperature: float = 1.0, seed: int = 0) -> SequenceSpec:
    return SequenceSpec(
        SamplingParams(temperature=temperature), seed, prompt_length=1, rule=rule, structure=SOME
    )


def _text(output: Sequence[int], vocab_size: int) -> TextPrefix:
    follower = Follower(lambda: Remainders(vocab_size), ())
    text = CountedText([PROMPT, *output], prompt_length=1, follower=follower)
    return text.prefix(1 + len(output))


class MaskedModels(TinyModels):
    """The models' distributions under the structure of `Remainders`, by production's arithmetic."""

    def _at(self, prefix: Prefix) -> tuple[NDArray[np.float64], SparseProbs]:
        target_V, draft = super()._at(prefix)
        if Remainders(self.vocab_size).accepts(prefix) < len(prefix):
            return target_V, draft  # Its probability is 0.
        draft_V = np.zeros(self.vocab_size)
        draft_V[draft.token_ids_M] = draft.probs_M
        with np.errstate(divide="ignore"):
            rows_2V = torch.from_numpy(np.log(np.stack((target_V, draft_V))).astype(np.float32))
        spec, text = _spec(), _text(prefix, self.vocab_size)
        rows = WindowRows(rows_2V[:1], CandidateTree((), ()), spec, text)
        masked_V = probabilities_of(rows.adjusted_V(0, ()), spec.sampling)
        return masked_V, cut_draft_probs(rows_2V[1], spec, text)


class OnlyDraftsMasked(MaskedModels):
    """The same, but the mask of the target was forgotten."""

    def target_V(self, prefix: Prefix) -> NDArray[np.float64]:
        return TinyModels._at(self, prefix)[0]


@pytest.mark.parametrize("kind", ["random", "other"])
def test_masks_are_those_of_the_law(kind: str) -> None:
    masked, plain = MaskedModels(5, kind), TinyModels(5, kind)
    for prefix in ((), (0,), (1, 2), (3,)):
        allowed_V = Remainders(5).allowed_V()
        matcher = Remainders(5)
        if matcher.advance(prefix) < len(prefix):
            continue
        allowed_V = matcher.allowed_V()
        expected_V = np.where(allowed_V, plain.target_V(prefix), 0)
        np.testing.assert_allclose(
            masked.target_V(prefix), expected_V / expected_V.sum(), rtol=1e-5
        )
        assert masked.draft(prefix).token_ids_M.tolist() == np.flatnonzero(allowed_V).tolist()


@pytest.mark.parametrize("rule", [one for one in RULES if rule_named(one).needs_draft_probs])
def test_rules_that_toss_coins_keep_the_masked_law(rule: str) -> None:
    """By sums over drafts and coins; without the target's mask the same sums differ."""
    node, shuffled = rule_node(rule), rule_named(rule).counts_paths
    models, broken = MaskedModels(4, "random"), OnlyDraftsMasked(4, "random")
    drafts = unordered_trees(models, 2, 1) if shuffled else drawn_chains(models, 1)
    if rule in ("recursive", "mcsd"):
        drafts = drawn_chains(models, 2)
    length = 2
    assert is_exact(models, committed_law(models, drafts, length, node, shuffled=shuffled))
    assert not is_exact(models, committed_law(broken, drafts, length, node, shuffled=shuffled))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_windows_have_the_tokens_of_plain_decoding(temperature: float) -> None:
    """Chains and trees, with candidates that the structure refuses among them."""
    draw = random.Random(3)
    vocab_size, refused = 6, 0
    for seed in range(40):
        spec = _spec(temperature=temperature, seed=seed)
        torch.manual_seed(seed)
        logits: dict[tuple[int, ...], torch.Tensor] = {(): torch.randn(vocab_size)}
        token_ids: list[int] = []
        parents: list[int] = []
        paths: list[tuple[int, ...]] = [()]
        for _ in range(9):
            parent = draw.randrange(len(paths))
            token = draw.randrange(vocab_size)
            path = (*paths[parent], token)
            if path in logits:
                continue
            logits[path] = torch.randn(vocab_size)
            parents.append(parent)
            token_ids.append(token)
            paths.append(path)
        tree = CandidateTree(tuple(token_ids), tuple(parents))
        rows_RV = torch.stack([logits[path] for path in paths])
        verdict = verify("coupled", rows_RV, tree, spec, _text((), vocab_size))
        taken = (*tree.tokens_of(verdict.accepted), verdict.token_id)
        for length, token_id in enumerate(taken):
            prefix = taken[:length]
            assert token_id == choose_token(logits[prefix], spec, _text(prefix, vocab_size))
            assert Remainders(vocab_size).accepts(taken[: length + 1]) == length + 1
        refused += sum(Remainders(vocab_size).accepts(path) < len(path) for path in paths)
        rows = [Row(spec, _text((), vocab_size), path) for path in paths]
        on_device, _ = choose_tokens(rows_RV, rows)
        nodes = [0, *(index + 1 for index in verdict.accepted)]
        assert tuple(on_device[nodes].tolist()) == taken
    assert refused > 20


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("grammars")
    make_tiny_tokenizer().save_pretrained(folder)
    return Grammars(folder, vocab_size=PADDED, end_token_ids=ENDS)


SCHEMA = Structure.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "far": {"type": "integer"}},
        "required": ["name", "far"],
        "additionalProperties": False,
    }
)


def test_a_follower_has_the_masks_of_a_fresh_matcher(grammars: Grammars) -> None:
    """After steps as a target takes them: paths side by side, cuts, and tokens in their place."""
    draw = random.Random(5)
    text = CountedText([7, 8, 9], prompt_length=3, follower=grammars.follower(SCHEMA))
    dead_ends = 0
    for _ in range(300):
        length = draw.randint(max(3, len(text.token_ids) - 4), len(text.token_ids))
        fresh = grammars.matcher(SCHEMA)
        output = text.token_ids[3:length]
        assert fresh.advance(output) == len(output)
        path: list[int] = []
        for _ in range(draw.randrange(4)):
            fits = np.flatnonzero(fresh.allowed_V())
            wrong = draw.random() < 0.2
            token = draw.randrange(PADDED) if wrong else int(draw.choice(fits))
            path.append(token)
            if token in ENDS or fresh.advance([token]) == 0:
                break
        allowed_V = text.allowed_V(length, path)
        taken = not set(path) & {*ENDS} and grammars.matcher(SCHEMA).accepts([*output, *path])
        if path and taken != len(output) + len(path):
            assert allowed_V is None
            dead_ends += 1
            path = []
            allowed_V = text.allowed_V(length, ())
            fresh = grammars.matcher(SCHEMA)
            fresh.advance(output)
        assert allowed_V is not None
        np.testing.assert_array_equal(allowed_V, fresh.allowed_V())
        assert not allowed_V[384:].any(), "a token id without a token"
        text.truncate_to(length)
        text.extend(path)
        if len(text.token_ids) > 40:
            text.truncate_to(3)
    assert dead_ends > 10


@pytest.mark.parametrize(
    "structure", [SCHEMA, SOME, Structure.choice(["lighthouse", "light rain"])]
)
def test_forced_tokens_are_the_only_ones(grammars: Grammars, structure: Structure) -> None:
    """So a forced candidate has probability 1, whatever the logits are."""
    draw = random.Random(11)
    num_forced = 0
    for _ in range(30):
        matcher = grammars.matcher(structure)
        for _ in range(40):
            forced = matcher.forced()
            for token_id in forced:
                assert np.flatnonzero(matcher.allowed_V()).tolist() == [token_id]
                assert matcher.advance([token_id]) == 1
            num_forced += len(forced)
            token_id = int(draw.choice(np.flatnonzero(matcher.allowed_V())))
            if token_id in ENDS:
                break
            matcher.advance([token_id])
    assert num_forced > 20 or structure is SOME


def test_only_complete_texts_may_end(grammars: Grammars) -> None:
    tokenizer = make_tiny_tokenizer()
    for structure, complete, incomplete in (
        (Structure.choice(["a", "ab", 'q"\n', "é😀"]), ["a", "ab", 'q"\n', "é😀"], ["q", "é"]),
        (Structure.json_object(), ['{"a": [1]}', "{}"], ["[1]", '{"a"', ""]),
        (Structure.json_schema("true"), ["[1]", "12"], ["["]),
        (SCHEMA, ['{"name": "x", "far": 1}'], ['{"name": "x"}', '{"far": 1.5}']),
        (Structure.regex(r"\d{3}-[a-z]+"), ["123-ab"], ["123-", "12-ab"]),
        (Structure.grammar('start: "a" start "b" | "c"'), ["aacbb"], ["aacb", "acbb"]),
    ):
        for text in (*complete, *incomplete):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            matcher = grammars.matcher(structure)
            fits = matcher.advance(token_ids) == len(token_ids)
            ended = fits and bool(matcher.allowed_V()[list(ENDS)].all())
            assert ended == (text in complete), (structure, text)


def test_draft_rows_of_another_length_follow_too(grammars: Grammars) -> None:
    spec = SequenceSpec(SamplingParams(temperature=0), 0, prompt_length=1, structure=SOME)
    for size in (300, PADDED, PADDED + 50):
        text = CountedText([9], prompt_length=1, follower=grammars.follower(SOME)).prefix(1)
        torch.manual_seed(size)
        for token_id in top_children(torch.randn(size), spec, text, 4):
            assert grammars.matcher(SOME).accepts([token_id]) == 1


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (Structure.json_schema("{"), "expected JSON"),
        (Structure.json_schema("[]"), "expected an object"),
        (Structure.json_schema('{"not":' * 5000 + "{}" + "}" * 5000), "expected JSON"),
        (Structure.json_schema({"type": "foo"}), "Invalid type: foo"),
        (Structure.json_schema({"$ref": "http://a.b/c"}), "is not present"),
        (Structure.json_schema({"$ref": "#"}), "NoExtension"),
        (Structure.json_schema('{}}, {"lark_grammar": "start: x"'), "expected JSON"),
        (Structure.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "nsatisfiable"),
        (Structure.regex("a("), "unclosed group"),
        (Structure.regex("(?=a)b"), "look-around"),
        (Structure.regex("(" * 20_000 + ")" * 20_000), "invalid regex"),
        (Structure.grammar("start: other"), "unknown name"),
        (Structure.grammar('start: "a" start'), "Too many items"),
        (Structure.grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "deeply nested"),
    ],
)
def test_what_does_not_compile_is_refused(
    grammars: Grammars, structure: Structure, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        grammars.check(structure)
    assert caught.value.field == "structure"
    assert len(str(caught.value)) < 500


def test_a_limit_that_is_exceeded_on_the_way_ends_one_matcher(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of the lexer run out. Another request with the same structure is not affected."""
    monkeypatch.setitem(_LIMITS, "max_lexer_states", 300)
    structure = Structure.regex("(.*a.{40}b)")
    follower = grammars.follower(structure)
    text = CountedText([9], prompt_length=1, follower=follower)
    draw = np.random.default_rng(0)

    def follow() -> None:
        for _ in range(200):
            allowed_V = text.allowed_V(len(text.token_ids), ())
            assert allowed_V is not None
            text.extend([int(draw.choice(np.flatnonzero(allowed_V)))])

    with pytest.raises(InternalError, match="no further: lexer error: too many states"):
        follow()
    with pytest.raises(InternalError, match="no further"):
        text.allowed_V(len(text.token_ids), ())
    assert grammars.matcher(structure).allowed_V().any()


def test_output_that_does_not_fit_is_an_error(grammars: Grammars) -> None:
    text = CountedText([9, 5], prompt_length=1, follower=grammars.follower(Structure.regex("a+")))
    with pytest.raises(InternalError, match="got token 5 at its place 0"):
        text.allowed_V(2, ())


def test_a_checkpoint_that_cannot_have_structures_says_why(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    without_end = Grammars(tmp_path, vocab_size=384, end_token_ids=())
    with pytest.raises(InvalidRequestError, match="has no end token"):
        without_end.check(SOME)
    (tmp_path / "tokenizer.json").write_text("{}")
    unusable = Grammars(tmp_path, vocab_size=384, end_token_ids=ENDS)
    with pytest.raises(InvalidRequestError, match="cannot use its tokenizer"):
        unusable.check(SOME)


def test_masks_that_take_too_long_end_their_sequence(tmp_path: Path) -> None:
    """By a clock that runs 6 ms for each mask after the first ones, which are free."""
    make_tiny_tokenizer().save_pretrained(tmp_path)
    ticks = iter(range(10_000))
    grammars = Grammars(
        tmp_path, vocab_size=PADDED, end_token_ids=ENDS, clock=lambda: 0.006 * next(ticks)
    )
    matcher = grammars.matcher(SOME)
    for _ in range(2 * FREE_MASKS - 1):
        matcher.allowed_V()
    with pytest.raises(InternalError, match="takes 6 ms a token, more than 5 ms"):
        matcher.allowed_V()
