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
"""Most messages of a chat, tool calls included. A chat template runs Python for each of them."""
MAX_TOOLS = 128
"""Most tools of a chat, as OpenAI's."""
MAX_TOOLS_BYTES = 256 * 1024
"""Most bytes of the JSON text of a chat's tools. A template may indent it, so that it grows by
MAX_JSON_DEPTH times the indentation for each value."""
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024
"""Most bytes of the JSON text of further variables of a chat template."""
MAX_JSON_DEPTH = 32
"""Most levels of objects and lists within each other, in JSON text that a chat template gets."""
MAX_BIASED_TOKENS = 4096
"""Most entries of `logit_bias`. Each has 14 bytes on the wire: 56 KiB, sent to each worker."""
MAX_RESUMED_TOKENS = 1024 * 1024
"""Most tokens of `resume`, or of `resume_samples` in all: at most 5 MiB on the wire, besides a
prompt of at most 10 MiB."""
MAX_SAMPLES = 128
"""Most `samples`. Each is a sequence with text, counts and KV of its own."""
MAX_STOP_TOKENS = 1024
"""Most `stop_token_ids`. Each has at most 5 bytes on the wire."""
MAX_STOP_STRINGS = 16
"""Most stop strings."""
MAX_STOP_LENGTH = 256
"""Most characters of a stop string. The automaton of all of them has at most 4,097 nodes, 1 MB."""
MAX_BAD_WORDS = 128
"""Most `bad_words`, as vLLM's."""
MAX_BAD_WORD_LENGTH = 256
"""Most characters of a bad word."""
MAX_BAD_WORD_TOKENS = 1024
"""Most tokens of all bad words, each with and without a space before it, as vLLM's. All words are
compared with the text before each row: some 60 us for 256 of them."""
MAX_LOGPROBS = 20
"""Most likeliest tokens that `logprobs` and `prompt_logprobs` ask for at each position."""
MAX_PROMPT_LOGPROBS = 262_144
"""Most entries of `prompt_logprobs`: 1 + the likeliest tokens, for each prompt token. A
driver holds some 70 bytes for each of them while its caller does not read: 18 MB."""
MAX_STRUCTURE_BYTES = 64 * 1024
"""Most bytes of a `structure` in UTF-8; of all its texts, if it is a choice."""
MAX_CHOICE_TEXTS = 1024
"""Most texts of a `structure` that is a choice."""
MAX_PREDICTION_BYTES = 1024 * 1024
"""Most bytes of a `prediction` in UTF-8. To index it takes some 0.3 s of a thread."""
MAX_NAME_LENGTH = 128
"""Most characters of `request_id`, `tenant`, `policy`, `rule` and `drafter`. Servers keep, log and
forward them."""
