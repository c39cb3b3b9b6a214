"""A configuration with emulated workers: what it accepts, and that it serves, so labeled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.driver.text import TextCodec
from cluster.placement.actors import DrafterActor, DriverActor, ShardActor
from cluster.placement.ledger import WorkerSetup
from cluster.placement.plan import Host, plan_placement
from paceline import AsyncClient, InvalidRequestError, Structure
from paceline.chat import Chat, Message
from paceline.options import GenerateOptions
from tests.cluster.config.test_config import complaint_of, config_of
from workers.models.catalog import STAND_IN, resolve_model
from workers.process.handshake import with_life

EMULATED = """
[target]
emulated = "70b-4xh100"
[[drafters]]
emulated = "1b-h100"
acceptance = 0.9
"""


def test_what_is_emulated_has_the_stand_in_for_a_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, EMULATED)
    assert config.target.model == STAND_IN
    (drafter,) = config.drafters
    assert (drafter.model, drafter.acceptance, drafter.hit_rate) == (STAND_IN, 0.9, 0.5)


def test_what_is_emulated_can_be_chatted_with(tmp_path: Path) -> None:
    codec = TextCodec(resolve_model(STAND_IN, home=tmp_path).folder)
    chat = [Message("user", "w100 w101"), Message("assistant", "w102"), Message("user", "w103")]
    assert codec.encode_chat(Chat(chat))[0] == (100, 101, 102, 103)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            EMULATED.replace("70b-4xh100", "70b-4xh10"),
            "target.emulated: there is no latency profile '70b-4xh10'; expected one of "
            "70b-4xh100, 70b-8xh100-2hosts, 8b-h100; did you mean 70b-4xh100?",
        ),
        (
            EMULATED.replace("1b-h100", "8b-h100"),
            "drafters[0].emulated: the latency profile '8b-h100' is for a target, expected one "
            "for a drafter: choose another",
        ),
        ("[target]\nemulated = '8b-h100'\n", 'drafters: expected "emulated" on the target and'),
        ("[[drafters]]\nemulated = '1b-h100'\n", 'drafters: expected "emulated" on the target and'),
        (f"[target]\nmodel = '{STAND_IN}'\n", 'target: "stand-in" is no model'),
        (EMULATED.replace("[[", "tensor_parallel = 4\n[["), "target: an emulated target is one"),
        ("[[drafters]]\nacceptance = 0.5\n", 'drafters[0]: "acceptance" and "hit_rate" need'),
        (
            EMULATED.replace("acceptance", "model = 'demo-draft'\nacceptance"),
            "an emulated worker has no model, got model = 'demo-draft'",
        ),
        (
            EMULATED.replace("acceptance", "prefix_cache = true\nacceptance"),
            "an emulated drafter has no KV to share",
        ),
        (
            EMULATED.replace('emulated = "70b', "model = 'demo'\nemulated = \"70b"),
            "target: an emulated worker has no model",
        ),
        (
            f"{EMULATED}[speculation]\nverification = 'rejection'\n",
            "speculation.verification: emulated workers have no distributions",
        ),
        (
            f"{EMULATED}[speculation]\nstopping = 'cost'\n",
            "speculation.stopping: emulated drafters have no logits",
        ),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in complaint_of(tmp_path, text)


@asynccontextmanager
async def _served(setup: WorkerSetup) -> AsyncIterator[AsyncClient]:
    """A client of the deployment, whose actors run in this process."""
    *shard_plans, drafter_plan = plan_placement(setup.config, [Host("here", 4)]).workers
    shards = [ShardActor() for _ in shard_plans]
    drafter, driver = DrafterActor(), DriverActor()
    try:
        targets = [
            await shard.serve(setup, plan, 0)
            for shard, plan in zip(shards, shard_plans, strict=True)
        ]
        guesser = await drafter.serve(setup, drafter_plan, 0)
        served = await driver.serve(
            setup,
            [with_life(target.address, target.life) for target in targets],
            {drafter_plan.name: with_life(guesser.address, guesser.life)},
            0,
            life=1,
            patience=0.0,
        )
        async with AsyncClient(served.address) as client:
            yield client
    finally:
        for actor in (driver, drafter, *shards):
            await actor.stop()


async def test_the_actors_serve_it_and_say_that_it_is_emulated(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"{EMULATED}[server]\ngrpc_port = 0\nhttp = false\n")
    setup = WorkerSetup(config, tmp_path, "127.0.0.1")
    async with _served(setup) as client:
        assert (await client.describe()).model == "emulated 70b-4xh100"
        texts = {
            policy: await client.generate([50, 51], max_tokens=24, seed=1, policy=policy)
            for policy in ("off", "lockstep")
        }
        assert texts["off"].token_ids == texts["lockstep"].token_ids
        assert texts["lockstep"].stats.accepted > 0
        with pytest.raises(InvalidRequestError, match="an emulated target has no logits"):
            await client.generate([50, 51], structure=Structure.json_object())
        kinds = {worker.name: worker.kind for worker in (await client.stats()).workers}
    assert kinds == {"shard-0": "target", "drafter-0": "emulated"}


async def test_two_target_groups_verify_one_sequence(tmp_path: Path) -> None:
    text = EMULATED.replace("[[", "groups = 2\n[[")
    policy = "[speculation]\npolicy = 'replicas'\n"
    config = config_of(tmp_path, f"{text}{policy}[server]\ngrpc_port = 0\nhttp = false\n")
    async with _served(WorkerSetup(config, tmp_path, "127.0.0.1")) as client:
        asked = GenerateOptions(max_tokens=48, seed=1)
        plain = await client.generate([50, 51], asked, policy="off")
        answer = await client.generate([50, 51], asked)
        assert answer.token_ids == plain.token_ids
        targets = [one for one in (await client.stats()).workers if one.kind == "target"]
        assert [one.name for one in targets] == ["shard-0", "replica-1.shard-0"]
        # All workers share one process, so drafters have little time. A prefill there is certain.
        assert targets[1].passes > 0
