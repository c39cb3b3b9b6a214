"""The names that configuration and requests give, and the limits of a request (docs/limits.md).

A request's limits are such that whatever a server sends of a single one fits into one message
(paceline/channel.py), and that no request can take much memory or time before it is decoded.
"""

from __future__ import annotations

import enum
from typing import Literal, get_args

DrafterKind = Literal["model", "ngram", "recycling"]
DRAFTER_KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)
MAX_WINDOW = 64
"""Most candidates of a sequence in a step; the least is 1."""
MAX_BRANCHES = 8
"""Most candidates of a position."""
MAX_PROPOSED = 1024
"""Most candidates of a proposal, and so of a slice (drafting.proto, Proposal)."""

MAX_SEQUENCE_TOKENS = 2 * 1024 * 1024
"""Most tokens of a sequence, prompt and output, whatever the model allows. A message that tells all
of them, as each worker gets one, has at most 5 bytes a token: 10 MiB of the 16 MiB it may have."""
MAX_PROMPT_BYTES = 8 * 1024 * 1024
"""Most bytes of a prompt in UTF-8, of a chat those of all its messages: to tokenize 8 MiB takes
seconds, during which requests behind it wait for the tokenizer. Four bytes a token, as in English
text, make a full sequence."""
MAX_MESSAGES = 4096
"""Most messages of a chat: a chat template runs Python for each of them."""
MAX_LOGIT_BIAS = 4096
"""Most entries of `logit_bias`, of 14 bytes each on the wire: 56 KiB, sent to each worker."""
MAX_STOP_TOKENS = 1024
"""Most `stop_token_ids`, of 5 bytes each on the wire."""
MAX_STOP_STRINGS = 16
"""Most stop strings."""
MAX_STOP_LENGTH = 256
"""Most characters of a stop string: the automaton of all of them has at most 4,097 nodes, 1 MB."""
MAX_NAME_LENGTH = 128
"""Most characters of `request_id`, `tenant` and `drafter`, which are kept, logged and sent on."""


class Rule(enum.Enum):
    """How candidates are verified (docs/rules.md)."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    KSEQ = "kseq"
    RECURSIVE = "recursive"
    MCSD = "mcsd"
    ONE_HOT = "one-hot"


class Stopping(enum.Enum):
    """When a drafter stops before its grant is used up (docs/rules.md)."""

    FIXED = "fixed"
    ADAEDL = "adaedl"
    CONFIDENCE = "confidence"
    COST = "cost"
