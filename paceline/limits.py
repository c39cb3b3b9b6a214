"""The limits of a request (docs/limits.md).

The limits ensure that what a server sends about one request fits into one message
(paceline/channel.py), and that a request takes little memory and time before it is decoded.
"""

from __future__ import annotations

MAX_WINDOW = 64
"""Most candidates of a sequence that a step verifies; the minimum is 1."""
MAX_BRANCHES = 8
"""Most candidates for one position."""
MAX_PROPOSED = 1024
"""Most candidates of a proposal, and so of a slice (drafting.proto, Proposal)."""

MAX_SEQUENCE_TOKENS = 2 * 1024 * 1024
"""Most tokens of a sequence, prompt and output, whatever the model allows. Each worker gets all of
them in one message, at most 5 bytes a token: 10 MiB of the 16 MiB that a message may have."""
MAX_PROMPT_BYTES = 8 * 1024 * 1024
"""Most bytes of a prompt in UTF-8; for a chat, of all its messages. Tokenizing 8 MiB takes seconds,
in which later requests wait for the tokenizer. English text has about four bytes a token, so this
is about MAX_SEQUENCE_TOKENS."""
MAX_MESSAGES = 4096
"""Most messages of a chat. A chat template runs Python for each of them."""
MAX_BIASED_TOKENS = 4096
"""Most entries of `logit_bias`. Each has 14 bytes on the wire: 56 KiB, sent to each worker."""
MAX_STOP_TOKENS = 1024
"""Most `stop_token_ids`. Each has at most 5 bytes on the wire."""
MAX_STOP_STRINGS = 16
"""Most stop strings."""
MAX_STOP_LENGTH = 256
"""Most characters of a stop string. The automaton of all of them has at most 4,097 nodes, 1 MB."""
MAX_NAME_LENGTH = 128
"""Most characters of `request_id`, `tenant`, `policy`, `rule` and `drafter`. Servers keep, log and
forward them."""
