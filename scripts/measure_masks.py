"""Print what the mask of a structure costs per token: `python scripts/measure_masks.py`.

It needs the demo model's tokenizer (`paceline models fetch demo`), whose vocabulary has 49,152
tokens. Each text is followed token by token, as the target follows an output. "mask" is the whole
addition to a row of logits: taking a token, computing the mask, applying it.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import numpy as np
from tokenizers import Tokenizer

from paceline.sampling import SamplingParams, SequenceSpec
from paceline.structure import Structure
from workers.engine.load.checkpoint import describe_checkpoint
from workers.models.catalog import default_home
from workers.verification.distribution import adjusted_logits
from workers.verification.grammars import Grammars
from workers.verification.prefix import CountedText

PERSON = {
    "name": "Ada Lovelace",
    "born": 1815,
    "known for": ["notes on the Analytical Engine", "the first published program"],
    "address": {"street": "12 St James's Square", "city": "London", "open": True},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "integer"},
        "known for": {"type": "array", "items": {"type": "string", "maxLength": 80}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"enum": ["London", "Paris", "Rome"]},
                "open": {"type": "boolean"},
            },
            "required": ["street", "city", "open"],
        },
    },
    "required": ["name", "born", "known for", "address"],
}
CASES = {
    "json_schema": (Structure.json_schema(SCHEMA), json.dumps(PERSON)),
    "json_object": (Structure.json_object(), json.dumps(PERSON, indent=2)),
    "regex": (Structure.regex(r"([A-Z][a-z]+ ){3,9}\d{4}-\d{2}-\d{2}"), "The Old Tower 1815-12-10"),
    "grammar": (
        Structure.grammar('start: sum\nsum: term ("+" term)*\nterm: /[0-9]+/ | "(" sum ")"'),
        "12+(3+(44+5)+6)+(7+(8+9))+10",
    ),
    "choice": (Structure.choice([f"answer number {n}" for n in range(1000)]), "answer number 577"),
}
REPEATS = 20


def main() -> None:
    """Measure all cases."""
    folder = default_home(os.environ) / "models" / "demo"
    info = describe_checkpoint(folder)
    begin = time.process_time()
    grammars = Grammars(folder, vocab_size=info.vocab_size, end_token_ids=info.end_token_ids)
    print(f"V = {info.vocab_size:,}; tokenizer read in {time.process_time() - begin:.2f} s")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    logits_V = np.random.default_rng(0).standard_normal(info.vocab_size).astype(np.float32)
    everything: list[float] = []
    for name, (structure, text) in CASES.items():
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        spec = SequenceSpec(SamplingParams(), 0, prompt_length=1, structure=structure)
        compiling, masks = [], []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            grammars.matcher(structure)
            compiling.append(1000 * (time.perf_counter() - begin))
            follower = grammars.follower(structure)
            counted = CountedText([1, *token_ids], prompt_length=1, follower=follower)
            counted.allowed_V(1, ())  # It waits for the compilation.
            for length in range(2, len(token_ids) + 2):
                begin = time.perf_counter()
                adjusted_logits(logits_V, spec, counted.prefix(length))
                masks.append(1000 * (time.perf_counter() - begin))
        everything += masks
        print(
            f"{name:12} compile {statistics.median(compiling):6.2f} ms   mask: median "
            f"{statistics.median(masks):.3f} ms, 99 of 100 below {np.quantile(masks, 0.99):.3f} ms"
        )
    print(f"all: median {statistics.median(everything):.3f} ms per token (aim: 0.3 ms)")


if __name__ == "__main__":
    main()
