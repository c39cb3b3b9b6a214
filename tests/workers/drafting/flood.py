"""A driver that floods a drafter: `python -m tests.workers.drafting.flood ADDRESS SEQUENCES`.

It commits whatever was drafted and asks for more, until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.grpc_peers import DraftStream, open_channel, proposals_in

SPEC = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=4)
UNTIL = 400


async def flood(address: str, count: int) -> None:
    """Draft for `count` sequences for ever."""
    async with open_channel(address) as channel:
        stream = DraftStream(channel)
        for number in range(count):
            await _open(stream, number)
        sys.stdout.write("flooding\n")
        sys.stdout.flush()
        while True:
            response = await stream.read()
            for one in proposals_in(response.proposals):
                if one.last or one.base.length + len(one.token_ids) >= UNTIL:
                    await _open(stream, one.sequence_id)


async def _open(stream: DraftStream, number: int) -> None:
    await stream.open(number, SPEC, [3, 5, 7, number + 9])
    await stream.grant(number, UNTIL)


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], int(sys.argv[2])))
