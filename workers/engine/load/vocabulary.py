"""The digest by which a driver and its drafters compare vocabularies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def digest_vocabulary(vocabulary: Mapping[str, int]) -> bytes:
    """SHA-256 over the (token, id) pairs of a tokenizer, added tokens included."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items()):
        encoded = token.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded + token_id.to_bytes(4, "little"))
    return digest.digest()
