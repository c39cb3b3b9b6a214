"""Sends the rows of an input file to a server, some at a time. Answers come in the file's order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from deploy.rows.inputs import BadRow, InputRow
from paceline.access import Access
from paceline.client import AsyncClient
from paceline.errors import InvalidRequestError, OverloadedError
from paceline.generation import Completion
from paceline.options import GenerateOptions

_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds to wait before each new attempt of a request that was refused because of a full queue."""


SEED_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer. `message` begins with its file and line."""

    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a row. `index` counts the rows of its file from 0."""

    index: int
    row: InputRow | BadRow
    outcome: Completion | Failure


async def answers_in_order(
    address: str,
    rows: Sequence[InputRow | BadRow],
    options: GenerateOptions,
    *,
    concurrency: int,
    access: Access | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> AsyncIterator[Answer]:
    """Send every good row, `concurrency` at a time, and yield the answers in the rows' order.

    All rows have the same `options`, but row i has the seed `options.seed` + i (0 + i for None).
    A row that is malformed or refused gives a Failure, and the others go on. `on_done` is called
    for each finished row, in any order. `access`: of the client. Raises UnavailableError
    if the server is gone. If the caller stops early, requests in flight are cancelled.
    """
    turns = asyncio.Semaphore(concurrency)
    async with AsyncClient(address, **(access or {})) as client:
        first_seed = options.seed or 0

        async def ask(index: int, row: InputRow | BadRow) -> Answer:
            if isinstance(row, BadRow):
                outcome: Completion | Failure = Failure(row.message)
            else:
                own = replace(options, seed=(first_seed + index) % SEED_SPACE)
                async with turns:
                    outcome = await _ask(client, row, own)
            on_done()
            return Answer(index, row, outcome)

        tasks = [asyncio.create_task(ask(index, row)) for index, row in enumerate(rows)]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(
    client: AsyncClient, row: InputRow, options: GenerateOptions
) -> Completion | Failure:
    for pause in _RETRY_SECONDS:
        try:
            return await client.generate(row.input, options)
        except OverloadedError:
            await asyncio.sleep(pause)
        except InvalidRequestError as error:
            return Failure(row.tell(str(error)))
    try:
        return await client.generate(row.input, options)
    except (OverloadedError, InvalidRequestError) as error:
        return Failure(row.tell(str(error)))
