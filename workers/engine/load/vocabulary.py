"""Vocabularies: the digest by which a driver and its drafters compare them, and tokens' bytes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CheckpointError
from paceline.text import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBE_TOKENS = 500


def digest_vocabulary(vocabulary: Mapping[str, int]) -> bytes:
    """SHA-256 over the (token, id) pairs of a tokenizer, added tokens included."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items()):
        encoded = token.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded + token_id.to_bytes(4, "little"))
    return digest.digest()


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder. Raises CheckpointError."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json: save the fast tokenizer beside the weights"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a usable tokenizer: {one_line(error)}") from error


def _characters_of_bytes() -> dict[str, int]:
    """Byte-level BPE's characters for bytes: printable ones as they are, others from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in seen)
    return {chr(byte): byte for byte in seen} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _characters_of_bytes()


class TokenBytes:
    """The bytes that each token of a tokenizer stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._raw = tokenizer
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._byte_tokens = frozenset(
            vocabulary[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary
        )
        self._concatenated: dict[int, bytes] = {}
        self._found: dict[int, bytes] = {}
        token_ids = sorted(vocabulary.values())
        self.anchor = next((one for one in token_ids if self._raw.decode([one]) == "a"), None)
        """A token with the text "a", behind which others are decoded; None: there is none."""
        self.are_concatenated = self._is_bytes_in_a_row(token_ids)
        """Whether text is the UTF-8 of the tokens' bytes in a row, as in byte-level BPE."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token has no text."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a single byte of a character that has no token (`<0xE6>`)."""
        return token_id in self._byte_tokens

    def concatenated(self, token_id: int) -> bytes:
        """The bytes of a token, where text is the UTF-8 of the tokens' bytes in a row."""
        known = self._concatenated.get(token_id)
        if known is None:
            token = self._raw.id_to_token(token_id) or ""
            try:
                known = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # An added token stands for its own text.
                known = token.encode()
            self._concatenated[token_id] = known
        return known

    def of(self, token_id: int) -> bytes:
        """The bytes of a token's text, which may be a part of a character. A special token has the
        text by which the tokenizer names it; an id without a token has none.
        """
        known = self._found.get(token_id)
        if known is None:
            known = self._found[token_id] = self._find(token_id)
        return known

    def _find(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id)
        if token is None or self.is_special(token_id):
            return (token or "").encode()
        if self.are_concatenated:
            return self.concatenated(token_id)
        if self.is_byte(token_id):
            return bytes([int(token[1:-1], 16)])
        if self.anchor is None:
            return self._raw.decode([token_id], skip_special_tokens=True).encode()
        # Behind another token it keeps a space at its start.
        both = self._raw.decode([self.anchor, token_id], skip_special_tokens=True)
        return both.removeprefix("a").encode()

    def _is_bytes_in_a_row(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokenizer's decoder is that of byte-level BPE: by its name, and by trying."""
        decoder = json.loads(self._raw.to_str())["decoder"]
        if not decoder or decoder["type"] != "ByteLevel":
            return False
        chosen = random.Random(0).choices(token_ids, k=_PROBE_TOKENS)
        own = b"".join(map(self.concatenated, chosen)).decode(errors="replace")
        return own == self._raw.decode(chosen, skip_special_tokens=False)
