"""A drafter's own tokens of a target's text, and its rows over the target's tokens."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.errors import CheckpointError
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_tokenizer
from workers.drafting.kinds.model.translation import WINDOW, TranslatedText, Translation, Vocabulary
from workers.drafting.tree import DraftTree, NewNodes

WORDS = [
    "▁",
    "▁t",
    "▁th",
    "▁the",
    "▁a",
    "▁b",
    "t",
    "h",
    "e",
    "a",
    "b",
    "he",
    "the",
    "ab",
    "é",
    "\n",
]
MERGES = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("t", "he"), ("▁", "a"), ("▁", "b")]
TEXTS = st.text(st.one_of(st.sampled_from("the ab é漢🙂\n."), st.characters(codec="utf-8")))


def sentencepiece(folder: Path, *, prepends_space: bool = False) -> Path:
    """As Gemma's, or Llama 2's: words begin with U+2581, unknown characters are byte tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + number for number, word in enumerate(WORDS)}
    vocabulary |= {"<unk>": 300, "<bos>": 301, "<eos>": 302}
    bpe = models.BPE(vocabulary, [*MERGES, ("a", "b")], unk_token="<unk>", byte_fallback=True)
    raw = Tokenizer(bpe)
    raw.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    if prepends_space:
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    folder.mkdir(parents=True)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [302]}')
    return folder


def byte_level(folder: Path, size: int) -> Path:
    make_tiny_tokenizer(size).save_pretrained(folder)
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "small": byte_level(folder / "small", 264),
        "large": byte_level(folder / "large", 420),
        "pieces": sentencepiece(folder / "pieces"),
        "prepending": sentencepiece(folder / "prepending", prepends_space=True),
    }


PAIRS = [
    ("large", "pieces"),
    ("pieces", "large"),
    ("small", "large"),
    ("large", "small"),
    ("prepending", "large"),
    ("large", "prepending"),
]


@pytest.fixture(scope="module")
def translations(folders: dict[str, Path]) -> dict[tuple[str, str], Translation]:
    """By drafter and target."""
    return {
        (own, target): Translation(folders[own], Vocabulary(folders[own]).size, folders[target])
        for own, target in PAIRS
    }


def open_tree(token_ids: list[int]) -> DraftTree:
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=len(token_ids))
    return DraftTree(spec, token_ids, max_position=10_000)


@pytest.mark.parametrize("names", PAIRS, ids=str)
@settings(max_examples=60)
@given(text=TEXTS, seed=st.integers(0, 99), noise=st.booleans())
def test_the_text_is_the_same_however_it_comes(
    translations: dict[tuple[str, str], Translation],
    names: tuple[str, str],
    text: str,
    seed: int,
    noise: bool,
) -> None:
    """Texts in the target's tokens, and tokens at random, whose bytes may be no characters."""
    pair, random = translations[names], Random(seed)
    target = pair.target
    token_ids = target.encode(("a" + text).encode())
    if noise:
        token_ids = [random.choice(token_ids + list(target.ids.values())) for _ in range(60)]
    tree = open_tree(token_ids[:1])
    translated = TranslatedText(pair, tree)
    at = 1
    while at < len(token_ids):
        new = token_ids[at : at + random.randint(1, 5)]
        at += len(new)
        final = translated.token_ids[: translated.num_final]
        kept = tree.outcome(tree.num_committed, new)
        same = translated.commit(tree, kept)
        assert translated.token_ids[: len(final)] == final
        assert same == len(final)
        assert len(translated.token_ids) - translated.num_final <= WINDOW
        back = pair.own.bytes_of(translated.token_ids)
        assert back.removeprefix(b"<bos>") == target.bytes_of(token_ids[:at])


@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_a_text_that_comes_token_by_token_has_the_tokens_of_the_whole(
    translations: dict[tuple[str, str], Translation], names: tuple[str, str]
) -> None:
    pair, random = translations[names], Random(1)
    words = ["the", "heat", "beta", "abbé", "\nthe", "ab.", "lighthouse", "keeper", "漢字"]
    text = " ".join(random.choices(words, k=400))
    token_ids = pair.target.encode(text.encode())
    tree = open_tree(token_ids[:1])
    translated = TranslatedText(pair, tree)
    for token_id in token_ids[1:]:
        translated.commit(tree, tree.outcome(tree.num_committed, [token_id]))
    whole = pair.own.encode(text.encode())
    assert translated.token_ids == whole


def test_drafted_tokens_stay_as_they_were_fed(
    translations: dict[tuple[str, str], Translation],
) -> None:
    """While nodes are left whose KV follows them; then they get the tokens of the whole text."""
    pair = translations["pieces", "large"]
    letters = [pair.target.ids[letter.encode()] for letter in (" ", "t", "h", "e", "a")]
    tree = open_tree(pair.target.encode(b"a"))
    text = TranslatedText(pair, tree)
    tree.set_grant(grant := tree.grant)
    grant.until_position = 9
    tree.set_grant(grant)
    tree.extend(NewNodes(letters))
    text.commit(tree, tree.outcome(1, letters[:4]))
    one = pair.own.ids
    assert text.token_ids[1:] == [one[b" "], one[b"t"], one[b"h"], one[b"e"]]
    text.commit(tree, tree.outcome(5, pair.target.encode(b"b")))
    assert text.token_ids[1:] == [one[b" the"], one[b"b"]]


def test_a_row_has_the_sums_of_the_tokens_that_begin_alike(
    translations: dict[tuple[str, str], Translation],
) -> None:
    pair = translations["pieces", "large"]
    logits_V = torch.linspace(-1, 2, pair.own.size)
    (row_V,) = pair.rows(logits_V[None]).tolist()
    own, target = pair.own.ids, pair.target.ids
    for text, token_id in target.items():
        begin_so = [
            logits_V[one].exp().item()
            for one in range(pair.own.size)
            if not pair.own.tokens.is_special(one)
            and pair.target.encode(pair.own.tokens.of(one))[:1] == [token_id]
        ]
        if text in own:
            assert row_V[token_id] == pytest.approx(math.log(sum(begin_so)), abs=1e-4)
        else:
            assert row_V[token_id] == -math.inf
    assert row_V[2] == pytest.approx(logits_V[302].item(), abs=1e-4), "the ends are each other's"


def test_tokenizers_that_cannot_be_translated_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Translation(folders["small"], 264, tmp_path)
    lossy = Tokenizer(models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be translated: .* got"):
        Translation(tmp_path, 2, folders["small"])
