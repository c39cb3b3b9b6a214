"""A drafter that learns while it serves drafts better, and the text stays the target's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline import GenerateOptions
from tests.cluster.system import Checkpoints, running_system
from tests.tiny import make_tiny_checkpoint

PROMPTS = ("The quick brown fox jumps over", "sea wind sea wind sea")


async def test_acceptance_rises_and_the_text_stays(tmp_path: Path) -> None:
    """The drafter has other weights than the target, so it begins with nothing that is right."""
    checkpoints = Checkpoints(
        make_tiny_checkpoint(tmp_path / "target"),
        make_tiny_checkpoint(tmp_path / "learning", seed=1),
    )
    greedy = GenerateOptions(
        temperature=0.0, seed=1, max_tokens=100, ignore_eos=True, policy="lockstep", window=4
    )
    drawn = replace(greedy, temperature=1.0)
    accepted = []
    drafters = {"learning": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters) as system:
        ask = system.client.generate
        plain = [await ask(one, replace(greedy, policy="off")) for one in PROMPTS]
        plain_drawn = await ask(PROMPTS[0], replace(drawn, policy="off"))
        for _ in range(4):
            for prompt, expected in zip(PROMPTS, plain, strict=True):
                found = await ask(prompt, greedy)
                assert found.token_ids == expected.token_ids
                accepted.append(found.stats.accepted)
        assert (await ask(PROMPTS[0], drawn)).token_ids == plain_drawn.token_ids
        await system.settle()
    assert sum(accepted[-2:]) > sum(accepted[:2]) + 20, accepted
