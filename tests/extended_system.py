"""A program for test_extending.py: serves a tiny system with what installed packages add.

It reads requests from stdin, as JSON: a list of objects with fields of GenerateOptions. It prints,
as JSON, the token ids and the number of accepted candidates of each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from paceline import GenerateOptions
from tests.cluster.system import DrafterChoice, make_checkpoints, running_system
from workers.drafting.kind import DRAFTERS

PROMPT = "sea sea sea sea sea"


async def main() -> None:
    asked = [GenerateOptions(max_tokens=24, ignore_eos=True, **one) for one in json.load(sys.stdin)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = make_checkpoints(Path(folder))
        drafters: dict[str, DrafterChoice] = {
            name: checkpoints.drafter if kind.default_model else name
            for name, kind in DRAFTERS.all().items()
        }
        answers = []
        async with running_system(checkpoints, drafters=drafters) as system:
            for options in asked:
                answer = await system.client.generate(PROMPT, options)
                answers.append((answer.token_ids, answer.stats.accepted))
            await system.settle()
            assert not any(worker.malformed for worker in system.driver.stats().workers)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
