"""Drafts with a model of another vocabulary than the target's (Timor et al. 2025).

The model has the committed text in its own tokens: the target's tokens are turned into bytes, and
encoded again as the text grows. Its rows of logits become rows over the target's tokens: a token of
the model counts for the target's token with which its text begins. Of these the tokens remain that
are one token in both vocabularies, byte by byte, so that what is drafted can be fed. Whatever rule
draws from such a row has a distribution of the target's tokens, and verifies as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.errors import CheckpointError
from workers.drafting.tree import DraftTree, Kept
from workers.engine.load.checkpoint import end_tokens_of
from workers.engine.load.vocabulary import TokenBytes, digest_vocabulary, read_tokenizer

WINDOW = 16
"""The last tokens of the model's text, which are encoded again with the text that follows them."""

_PROBE = "The cat's 12 ideas: café, naïve (x != y);\n\tend."


class Vocabulary:
    """A tokenizer: text as tokens, and tokens as bytes."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for a tokenizer whose tokens do not give back their text."""
        self._tokenizer: Tokenizer = read_tokenizer(folder)
        self.tokens = TokenBytes(self._tokenizer)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.digest = digest_vocabulary(vocabulary)
        self.size = max(vocabulary.values(), default=-1) + 1
        plain, whole = (
            self._tokenizer.encode(_PROBE, add_special_tokens=special).ids
            for special in (False, True)
        )
        self.begin: list[int] = whole[: whole.index(plain[0])] if plain else []
        """The special tokens with which the tokenizer begins a text."""
        back = self.bytes_of(plain)
        self._prepends = back == b" " + _PROBE.encode()
        if not self._prepends and back != _PROBE.encode():
            raise CheckpointError(
                f"{folder / 'tokenizer.json'} cannot be translated: expected tokens that give back "
                f"their text, {_PROBE!r}, got {back.decode(errors='replace')!r}"
            )

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The token of each text that is one token. Of several the one that text is encoded as."""
        ordinary = [one for one in range(self.size) if not self.tokens.is_special(one)]
        ordinary.sort(key=self.tokens.is_byte, reverse=True)  # the last one stays
        return {text: one for one in ordinary if (text := self.tokens.of(one))}

    @cached_property
    def special(self) -> dict[bytes, int]:
        return {self.tokens.of(one): one for one in range(self.size) if self.tokens.is_special(one)}

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self.tokens.of, token_ids))

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a text. A byte that is no character is the token of that byte, if any."""
        found: list[int] = []
        while text:
            try:
                valid, broken, text = text.decode(), b"", b""
            except UnicodeDecodeError as error:
                valid, broken = text[: error.start].decode(), text[error.start : error.end]
                text = text[error.end :]
            found += self._encode(valid)
            found += self._single(broken)
        return found

    def _encode(self, text: str) -> list[int]:
        """As `encode`. A space that the tokenizer puts before a text is taken away."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._prepends or (back := self.bytes_of(found)) == (whole := text.encode()):
            return found
        if text.startswith(" "):
            return self._tokenizer.encode(text[1:], add_special_tokens=False).ids
        if back == b" " + whole:
            first = self.tokens.of(found[0])[1:]
            found[:1] = [self.ids[first]] if first in self.ids else self._single(first)
        return found

    def _single(self, text: bytes) -> list[int]:
        """A token for each byte that has one."""
        return [self.ids[one] for byte in text if (one := bytes([byte])) in self.ids]

    def first_of(self, text: bytes) -> int | None:
        """The first token of a text; None: it cannot be encoded."""
        known = self.ids.get(text)
        if known is None and (found := self.encode(text)) and self.bytes_of(found) == text:
            return found[0]
        return known


class Translation:
    """Between the target's vocabulary and that of the drafter's model."""

    def __init__(self, model: Path, num_logits: int, target: Path) -> None:
        """The folders of both. `num_logits`: those of a row of the model.

        Takes some seconds for 262,144 tokens. Raises CheckpointError.
        """
        self.target, self.own = Vocabulary(target), Vocabulary(model)
        self.own_ids: dict[int, int] = {
            token_id: own
            for ids, others in (
                (self.target.ids, self.own.ids),
                (self.target.special, self.own.special),
            )
            for text, token_id in ids.items()
            if (own := others.get(text)) is not None
        }
        """The token of the model for each token of the target that has one."""
        texts = [self.own.tokens.of(one) for one in range(self.own.size)]
        column_of = [self.target.first_of(text) for text in texts]
        for text, own in self.own.special.items():
            column_of[own] = self.target.special.get(text)
        ends, own_ends = end_tokens_of(target), end_tokens_of(model)
        if ends and own_ends:
            self.own_ids[ends[0]] = own_ends[0]
            for own in own_ends:
                column_of[own] = ends[0]
        if not self.own_ids:
            raise CheckpointError(
                f"{model} and {target} have no token in common: nothing can be drafted"
            )
        nowhere = self.target.size
        columns = [one if one in self.own_ids else nowhere for one in column_of]
        self._columns_V = torch.tensor(columns + [nowhere] * (num_logits - len(columns)))

    @torch.inference_mode()
    def rows(self, logits_TV: Tensor) -> Tensor:
        """Rows over the target's tokens, [T, target.size], from rows of the model.

        A token's logit is the log of the sum over the model's tokens that count for it; -inf: none.
        """
        if self._columns_V.device != logits_TV.device:
            self._columns_V = self._columns_V.to(logits_TV.device)
        peaks_T1 = logits_TV.amax(dim=1, keepdim=True)
        sums = logits_TV.new_zeros(len(logits_TV), self.target.size + 1)
        sums.index_add_(1, self._columns_V, (logits_TV - peaks_T1).exp_())
        return sums[:, :-1].log_() + peaks_T1


class TranslatedText:
    """The committed text of one sequence in the tokens of the drafter's model."""

    def __init__(self, translation: Translation, tree: DraftTree) -> None:
        self._pair = translation
        self.token_ids = list(translation.own.begin)
        self.num_final = len(self.token_ids)
        """The number of tokens, from the first on, that stay whatever text follows."""
        begin = translation.target.begin
        self._num_read = len(begin) if list(tree.committed[: len(begin)]) == begin else 0
        self.read(tree, tree.num_settled)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        return [self._pair.own_ids[token_id] for token_id in token_ids]

    def read(self, tree: DraftTree, end: int) -> None:
        """Append the target's committed tokens up to `end`."""
        new = tree.committed[self._num_read : end]
        self._num_read = max(end, self._num_read)
        self._append(self._pair.target.bytes_of(new))

    def commit(self, tree: DraftTree, kept: Kept) -> int:
        """Append what an outcome committed. Returns how many tokens from the first on stay."""
        unchanged = self.num_final
        if not tree.is_settled:
            return unchanged  # nothing was drafted; it is read later
        if kept.nodes:  # KV of nodes follows the tokens as they were drafted
            self._num_read = tree.num_committed
            self.token_ids += self.of(kept.token_ids)
            self._finish()
        else:
            self.read(tree, tree.num_committed)
        return unchanged

    def _append(self, text: bytes) -> None:
        """Append text. The last tokens become those of the text as a whole.

        What was cut off before a word is no word of its own: up to the first space the tokens stay.
        """
        own, first = self._pair.own, self.num_final
        before = [own.tokens.of(one) for one in self.token_ids[first:]]
        text = b"".join(before) + text
        new = own.encode(text)
        # By the number of bytes that follow, since a tokenizer may change what it encodes.
        place_of, left = {0: len(new)}, 0
        for place in reversed(range(len(new))):
            left += len(own.tokens.of(new[place]))
            place_of[left] = place
        keep, left = 0, len(text)
        for count, piece in enumerate(before, start=1):
            left -= len(piece)
            if left in place_of and text[len(text) - left :][:1].isspace():
                keep = count
                break
        begin = place_of[left] if keep else 0
        self.token_ids[first + keep :] = new[begin:]
        self._finish()

    def _finish(self) -> None:
        self.num_final = max(self.num_final, len(self.token_ids) - WINDOW)
