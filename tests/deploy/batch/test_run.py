"""A batch on a tiny system: whatever interrupts it, the output's bytes are the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.access.gate import Gate
from cluster.access.keys import KeyFile
from cluster.gateway.drivers import DriverPool
from deploy.batch import run
from deploy.batch.batch_file import BatchFile
from deploy.batch.journal import open_journal
from deploy.batch.run import Batch
from paceline import GenerateOptions, Message
from paceline.access import Access
from paceline.errors import InvalidRequestError, UnavailableError
from tests.cluster.access.key_files import keys_in
from tests.cluster.system import System, make_checkpoints, running_system

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED = 11


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    checkpoints = make_checkpoints(tmp_path_factory.mktemp("batch"))
    async with running_system(checkpoints, drafters={"d0": checkpoints.drafter}) as system:
        yield system


def asking(index: int, **body: Any) -> dict[str, Any]:
    """A row: chats and completions in turn, of different lengths."""
    given = {"temperature": 1.0, "max_tokens": 2 + index % 5, "ignore_eos": True} | body
    what: dict[str, Any]
    if index % 2:
        url, what = "/v1/completions", {"prompt": f"Row {index} é"}
    else:
        url = "/v1/chat/completions"
        what = {"messages": [{"role": "user", "content": f"Row {index} \U0001f600"}]}
    return {"custom_id": f"row-{index}-é", "method": "POST", "url": url, "body": what | given}


ROWS = [
    *map(asking, range(6)),
    asking(6, n=3),
    asking(7, prompt=["one", "two"], n=2, seed=5),
    asking(8, max_tokens=0),
    asking(9, model="another"),
    asking(3),
    asking(11, speculation="off", temperature=0),
]
FAILED = {8: 400, 9: 404, 10: 400}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    return path


async def answer(
    address: str, source: Path, journal_path: Path, *, concurrency: int = 4, **options: Any
) -> tuple[bytes, Batch, int]:
    """Run a batch. Returns the output, the batch, and the rows that the journal had."""
    file = BatchFile(source)
    output = journal_path.with_suffix(".out")
    facts: dict[str, str | int] = {"input": file.digest, "rows": file.num_rows, "seed": SEED}
    with open_journal(journal_path, facts, num_rows=file.num_rows) as journal:
        had = journal.done
        batch = Batch(file, journal, seed=SEED, complain=lambda line: None)
        pool = DriverPool([address], **options)
        await batch.decode(pool, concurrency=concurrency, tell=lambda: None)
        batch.write(output)
    return output.read_bytes(), batch, had


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(
    system: System, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, bytes]:
    """The output of a run without interruptions, one row at a time, and its journal."""
    path = tmp_path_factory.mktemp("reference") / "journal"
    output, batch, _ = await answer(system.server.address, source, path, concurrency=1)
    assert (batch.totals.done, batch.totals.failed) == (len(ROWS), len(FAILED))
    return output, path.read_bytes()


async def test_the_output_has_openais_form_and_the_text_of_each_request(
    system: System, reference: tuple[bytes, bytes]
) -> None:
    assert reference[0].isascii()
    lines = [json.loads(line) for line in reference[0].splitlines()]
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in ROWS]
    assert {
        index: line["response"]["status_code"]
        for index, line in enumerate(lines)
        if line["response"]["status_code"] != 200
    } == FAILED
    assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines)
    assert all(line["error"] is None for line in lines)
    assert len({line["id"] for line in lines}) == len(lines)
    # Row i has seed S + 128 i, and its texts are those of plain decoding with this seed.
    chat = [Message("user", "Row 6 \U0001f600")]
    body = lines[6]["response"]["body"]
    options = GenerateOptions(
        temperature=1.0, max_tokens=3, ignore_eos=True, seed=SEED + 6 * 128, policy="off"
    )
    samples = await system.client.generate(chat, options, samples=3)
    told = [choice["message"]["content"] for choice in body["choices"]]
    assert told == [one.text for one in samples]
    assert body["usage"]["completion_tokens"] == 9
    assert (body["created"], body["model"], "metrics" in body) == (0, "target", False)
    assert len(lines[7]["response"]["body"]["choices"]) == 4


async def test_the_bytes_do_not_depend_on_the_order_in_which_rows_end(
    system: System, source: Path, tmp_path: Path, reference: tuple[bytes, bytes]
) -> None:
    output, _, _ = await answer(system.server.address, source, tmp_path / "j", concurrency=64)
    assert output == reference[0]
    assert (tmp_path / "j").read_bytes() != reference[1]


async def test_cut_in_any_record_a_run_does_what_is_missing(
    system: System, source: Path, tmp_path: Path, reference: tuple[bytes, bytes]
) -> None:
    output, journal = reference
    path = tmp_path / "j"
    place, num_kept = 0, -3  # the format, and two records of facts
    for size in range(0, len(journal), 211):
        while (end := _next_end(journal, place)) <= size:
            place, num_kept = end, num_kept + 1
        path.write_bytes(journal[:size])
        again, batch, had = await answer(system.server.address, source, path)
        assert had == max(0, num_kept), size
        assert batch.totals.done == len(ROWS) - had
        assert again == output, size


def _next_end(journal: bytes, place: int) -> int:
    if place == 0:
        return journal.index(b"\n") + 1
    return place + 8 + int.from_bytes(journal[place : place + 4], "little")


async def test_a_run_that_is_cancelled_keeps_what_it_has(
    system: System, source: Path, tmp_path: Path, reference: tuple[bytes, bytes]
) -> None:
    path = tmp_path / "j"
    begun = asyncio.create_task(answer(system.server.address, source, path, concurrency=1))
    async with asyncio.timeout(60):
        while not path.exists() or path.stat().st_size < len(reference[1]) // 3:
            await asyncio.sleep(0.001)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    await system.settle()
    output, _, had = await answer(system.server.address, source, path)
    assert 0 < had < len(ROWS)
    assert output == reference[0]


async def test_another_model_is_refused(
    system: System, source: Path, tmp_path: Path, reference: tuple[bytes, bytes]
) -> None:
    path = tmp_path / "j"
    path.write_bytes(reference[1])
    with pytest.raises(InvalidRequestError, match="of the model target, not of the model large"):
        await answer(system.server.address, source, path, served_model_name="large")


async def test_more_choices_than_a_key_may_have_are_refused_at_once(tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "keys", batch={"tenant": "b", "concurrency": 2})
    gate = Gate(KeyFile(tmp_path / "keys"))
    source = tmp_path / "in"
    rows = [asking(0, prompt="sea", n=3, max_tokens=2), asking(1, prompt="sea", n=2, max_tokens=2)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    access: Access = {"key": keys["batch"]}
    async with (
        asyncio.timeout(60),
        running_system(make_checkpoints(tmp_path), gate=gate, access=access) as system,
    ):
        output, _, _ = await answer(system.server.address, source, tmp_path / "j", access=access)
    first, second = [json.loads(line)["response"] for line in output.splitlines()]
    assert first["status_code"] == 403
    assert "counts as 3 requests" in first["body"]["error"]["message"]
    assert (second["status_code"], len(second["body"]["choices"])) == (200, 2)


async def test_a_lost_server_ends_the_run_and_the_next_one_goes_on(
    system: System,
    source: Path,
    tmp_path: Path,
    reference: tuple[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "PATIENCE_SECONDS", 0.2)
    path = tmp_path / "j"
    path.write_bytes(reference[1][: len(reference[1]) // 2])
    kept = path.stat().st_size
    with pytest.raises(UnavailableError, match=r"no row has ended for 0\.2 s: .*run the same"):
        await answer("127.0.0.1:9", source, path)
    assert path.stat().st_size <= kept
    output, _, had = await answer(system.server.address, source, path)
    assert had > 0
    assert output == reference[0]
