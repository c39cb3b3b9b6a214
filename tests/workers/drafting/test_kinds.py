"""The registry of drafter kinds, and a kind that another package adds."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Unpack

import pytest

from paceline import GenerateOptions
from paceline.errors import ConfigError, InvalidRequestError
from paceline.options import OptionFields
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.cluster.system import make_checkpoints, running_system
from tests.recipes import recipes
from tests.workers.grpc_peers import DraftStream, open_channel
from workers.drafting.kind import DRAFTERS, CandidateKind, DrafterKind
from workers.drafting.kinds.ngram import NGRAM

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [5, 6, 7, 5, 6, 8, 5, 6]
SPEC = SequenceSpec(SamplingParams(), seed=3, prompt_length=len(PROMPT), end_token_ids=(99,))


@pytest.fixture
async def bigram_address(tmp_path: Path) -> AsyncIterator[str]:
    """A drafter of the kind of the recipe, in a process where its package is installed."""
    recipes()["A drafter kind"].install(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.drafting.drafter", "--kind", "bigram"),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    yield (await process.stdout.readline()).decode().strip()
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_a_kind_of_another_package_drafts_over_grpc(bigram_address: str) -> None:
    async with open_channel(bigram_address) as channel:
        stream = DraftStream(channel)
        await stream.open(1, SPEC, PROMPT)
        await stream.grant(1, 12)
        (first,) = await stream.proposals(4)
        # 5 follows 6 never; 7 and 8 once each, 7 first; 5 follows 7 once.
        assert list(first.token_ids) == [7, 5, 6, 7]
        assert (first.base.length, first.base.hash) == (len(PROMPT), hash_prefix(PROMPT))
        assert first.last, "the grant is used"
        await stream.outcome(1, len(PROMPT), [8, 5, 6, 8, 99, 6])
        await stream.grant(1, 30)
        (second,) = await stream.proposals(3)
        assert list(second.token_ids) == [8, 5, 6] * 5 + [8], "8 followed 6 most often by now"


async def test_a_driver_uses_a_kind_that_is_not_installed_beside_it(
    bigram_address: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "bigram" not in DRAFTERS
    checkpoints = make_checkpoints(tmp_path_factory.mktemp("models"))
    addresses = {"d": bigram_address}
    async with running_system(checkpoints, drafter_addresses=addresses) as system:
        assert {one.kind for one in system.driver.stats().workers} == {"target", "bigram"}

        async def generate(**options: Unpack[OptionFields]) -> tuple[tuple[int, ...], int]:
            asked = GenerateOptions(max_tokens=24, ignore_eos=True, temperature=0.0)
            answer = await system.client.generate("sea sea sea sea", asked, **options)
            return answer.token_ids, answer.stats.drafted

        plain, none = await generate(policy="off")
        text, drafted = await generate(drafter="bigram", policy="lockstep")
        assert text == plain
        assert drafted > none == 0
        with pytest.raises(
            InvalidRequestError, match=r"'kseq'.* candidates of the drafter 'bigram'"
        ):
            await generate(drafter="bigram", rule="kseq")
        with pytest.raises(
            InvalidRequestError, match="expected one of model, ngram, parallel, recycling, suffix"
        ):
            await generate(drafter="trigram")


def test_the_table_of_the_docs_names_each_kind_and_its_rules() -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| drafter | rules |")
    shown = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert [name for name, _ in shown] == list(DRAFTERS)
    everything = frozenset(rule for kind in DRAFTERS.all().values() for rule in kind.rules)
    for name, rules in shown:
        named = frozenset(re.findall(r"`([\w-]+)`", rules))
        fitting = everything - named if rules.startswith("all but") else named
        assert fitting == DRAFTERS.get(name, field="kind").rules, name


def test_reading_the_registry_imports_no_torch() -> None:
    program = (
        "import sys\nfrom workers.drafting.kind import DRAFTERS\nprint(len(DRAFTERS.all()), "
        "[name for name in ('torch', 'transformers', 'ray', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{len(DRAFTERS.all())} []"


@pytest.mark.parametrize("name", ["any", "target", "emulated"])
def test_a_name_with_another_meaning_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        DrafterKind(name=name, help="", load=NGRAM.load, candidates=CandidateKind.DETERMINISTIC)
