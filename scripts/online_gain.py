"""Measures what a drafter learns while it serves: `python scripts/online_gain.py WORK`.

A student of four layers of the demo model, distilled for ten minutes on questions about facts,
drafts for the demo target. Then the topic changes to sums. The table has, over the same texts of
sums, the share of drafted tokens that the target accepts: as the student was loaded, after
learning 2,000 tokens of the first topic, and after 2,000 tokens of the second. Texts and student
lie in WORK, so a later run goes on, or measures only.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import demo_draft_prompts as made
import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.sampling import SamplingParams, SequenceSpec
from workers.distillation.network import read_network
from workers.distillation.run import Distillation, Recipe
from workers.distillation.sampling import Prompts, sample_rows
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.tree import Grant
from workers.engine.open import open_engine
from workers.models.catalog import default_home, resolve_model
from workers.models.learned import assemble
from workers.process.atomic_files import replaced_folder

END, WINDOW, LEARNED = 2, 4, 2000
RECIPE = Recipe(sample_seconds=60, train_seconds=600, layers=4, num_positions=256)

Text = tuple[list[int], int]  # token ids, and how many of them are the prompt


def prompts(templates: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    draw = random.Random(3)
    texts = [made.HEAD + made._filled(draw.choice(templates), draw) + made.TAIL for _ in range(600)]
    closing = [END, *tokenizer.encode("\n", add_special_tokens=False).ids]
    return [closing, *(tokenizer.encode(one, add_special_tokens=False).ids for one in texts)]


def texts_of(path: Path, target: Path, token_ids: list[list[int]]) -> list[Text]:
    """Prompts with greedy answers."""
    if not path.exists():
        on_cpu = Prompts.of(token_ids, [False] * len(token_ids), torch.device("cpu"))
        network = read_network(target, torch.float32).requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        tokens, own = sample_rows(network, on_cpu, torch.zeros(32), 256, [END], generator)
        np.savez(path, tokens=tokens, own=own)
    stored, found = np.load(path), []
    for tokens, own in zip(stored["tokens"], stored["own"], strict=True):
        starts = [0, *(np.flatnonzero(own[:-1] & ~own[1:]) + 1), len(tokens)]
        for first, last in pairwise(starts):
            if (length := int((~own[first:last]).sum())) < last - first:
                found.append((tokens[first:last].tolist(), length))
    return found


def accepted(desk: DraftingDesk, texts: list[Text], *, learns: bool) -> float:
    """Draft along the first LEARNED tokens of texts. The share of drafts accepted."""
    session, right, drafted, seen = desk.open_session(), 0, 0, 0
    for tokens, length in texts:
        if seen >= LEARNED:
            break
        spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=length)
        assert session.open(1, spec, tokens[:length]) is None
        position = length
        while position < len(tokens):
            session.grant(1, Grant(until_position=min(position + WINDOW, len(tokens))))
            while desk.has_work:
                desk.run_pass()
            draft, expected = session.trees[1].tokens[1:], tokens[position : position + WINDOW]
            agree = [own == other for own, other in zip(draft, expected, strict=False)]
            hits = [*agree, False].index(False)
            right, drafted = right + hits, drafted + min(hits + 1, len(agree))
            committed = tokens[position : position + hits + 1]
            session.outcome(1, position, committed)
            position, seen = position + len(committed), seen + len(committed)
            while learns and desk.learn():
                pass
        session.close(1)
    desk.close_session(session)
    return right / drafted


def main() -> None:
    work = Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    target = resolve_model("demo", home=default_home({})).folder
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    facts = ["Explain {s}.", "Tell me about {s}.", "Give me five facts about {s}."]
    asked = [prompts(facts, tokenizer), prompts(made._choices(made.SUMS), tokenizer)]
    first, second = (texts_of(work / f"{n}.npz", target, one) for n, one in enumerate(asked))
    if not (work / "drafter").exists():
        run = Distillation(target, work, RECIPE.on_this_machine(), [END], print)
        learned = run.run(asked[0], [False] * len(asked[0]))
        with replaced_folder(work / "drafter") as into:
            assemble(target, learned, into)
    engine = open_engine(
        work / "drafter", weights="int8", threads=1, kv_memory_bytes=1 << 28, device="cpu"
    )
    half = len(second) // 2
    for name, learns, before in (
        ("as it was loaded", False, ()),
        ("after the first topic", True, (first,)),
        ("after both topics", True, (first, second[:half])),
    ):
        desk = DraftingDesk(
            ModelProposer(engine, prefix_cache=False, learns=learns), max_sequences=1
        )
        for texts in before:
            accepted(desk, texts, learns=True)
        sys.stdout.write(f"{name}: {accepted(desk, second[half:], learns=False):.3f}\n")


if __name__ == "__main__":
    main()
