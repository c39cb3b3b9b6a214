"""Emulated workers under the real driver: equal text, and another one if KV goes wrong."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.driver.driver import Driver, DriverOptions
from paceline.errors import ConfigError
from paceline.generation import Stats
from paceline.options import GenerateOptions
from paceline.sampling import SamplingParams, SequenceSpec
from tests.cluster.system import eventually
from tests.workers.emulated.asking import answers, complete
from workers.drafting.desk import DraftingDesk
from workers.drafting.tree import Grant
from workers.emulated.device_wait import MOST_MADE_GOOD, DeviceClock
from workers.emulated.drafter import parse_guess, serve_replay_drafter
from workers.emulated.latency_profiles import DeviceProfile, LinkProfile, load_profile
from workers.emulated.relay import Relay
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_target import BLOCK_SIZE, ReplayEngine
from workers.emulated.replay_text import Guess, PrefixReader, ReplayText
from workers.emulated.target import serve_replay_target
from workers.engine.load.checkpoint import CheckpointInfo, inspect_checkpoint
from workers.engine.slices import Slice
from workers.models.stand_in import make_stand_in
from workers.process.server import RunningServer

HOST = "127.0.0.1"
MAX_TOKENS = 40
STEP_SECONDS = 0.01829
"""Plain decoding of one sequence on the 70b-4xh100."""
PROMPTS = [[100, 101, 102], list(range(200, 240)), [300]]


def _fast(name: str) -> DeviceProfile:
    """A profile with a hundredth of its times, because these tests do not measure time."""
    return load_profile(name).scaled(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(scope="module")
def info(folder: Path) -> CheckpointInfo:
    return inspect_checkpoint(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_equal_text_for_chains_and_trees(folder: Path, temperature: float) -> None:
    target = await serve_replay_target(folder, _fast("70b-4xh100"), host=HOST)
    guesses = [Guess(0.75, 0.85, 1)]
    drafters = await serve_replay_drafter(folder, _fast("1b-h100"), guesses, host=HOST)
    servers: list[RunningServer] = [target, *drafters]
    options = DriverOptions(
        folder=folder,
        target_addresses=(target.address,),
        drafter_addresses={"drafter-0": drafters[0].address},
    )
    driver = Driver(options)
    try:
        await driver.start()
        asked = GenerateOptions(temperature=temperature, max_tokens=MAX_TOKENS, policy="off")
        plain = [one.token_ids for one in await answers(driver, PROMPTS, asked)]
        accepted = {}
        for policy in ("lockstep", "chain"):
            for branches in (1, 3):
                windows = replace(asked, policy=policy, window=6, branches=branches)
                found = await answers(driver, PROMPTS, windows)
                assert [one.token_ids for one in found] == plain, (policy, branches)
                accepted[policy, branches] = sum(one.stats.accepted for one in found)
        assert accepted["lockstep", 1] > 0
        driver.scheduler.check_integrity()
    finally:
        await driver.stop()
        for server in servers:
            await server.stop()


async def test_a_step_takes_what_the_profile_says(folder: Path) -> None:
    """It takes longer only by overruns, which are counted."""
    target = await serve_replay_target(folder, load_profile("70b-4xh100"), host=HOST)
    driver = Driver(DriverOptions(folder=folder, target_addresses=(target.address,)))
    try:
        await driver.start()
        began = time.monotonic()
        before = driver.stats()
        options = GenerateOptions(max_tokens=10, policy="off", ignore_eos=True)
        answer = await complete(driver, PROMPTS[0], options)
        # The last step is counted just after its tokens went out.
        all_told = _busy(before)[0] + 10 * STEP_SECONDS * 0.999
        await eventually(lambda: _busy(driver.stats())[0] >= all_told, 60)
        after, real_seconds = driver.stats(), time.monotonic() - began
    finally:
        await driver.stop()
        await target.stop()
    assert answer.stats.steps == 10
    told = _busy(after)[0] - _busy(before)[0]
    if not _busy(after)[1]:
        assert told == pytest.approx(10 * STEP_SECONDS, rel=1e-3)
    # Passes end by deadline, so together they are early by one pass's correction at most.
    assert real_seconds >= told - MOST_MADE_GOOD


def _busy(stats: Stats) -> tuple[float, int]:
    """Seconds of the target's passes, and the number of overruns among them."""
    (shard,) = (one for one in stats.workers if one.name == "shard-0")
    return shard.busy_seconds, shard.overruns


def test_a_clock_counts_what_the_next_pass_cannot_make_good() -> None:
    clock = DeviceClock()
    began = clock.now()
    end = clock.finish(began, 0.04)
    assert began + 0.04 <= end <= clock.now()
    begin = clock.now() - 2.0  # two seconds of the pass have passed already
    end = clock.finish(begin, 0.4)
    latest = clock.now()
    assert 1.6 - MOST_MADE_GOOD <= clock.overrun_seconds <= latest - begin - 0.4
    assert end == pytest.approx(begin + 0.4 + clock.overrun_seconds, abs=MOST_MADE_GOOD)


def _engine(info: CheckpointInfo) -> tuple[ReplayEngine, ReplayText]:
    text = ReplayText(info.vocab_size)
    return ReplayEngine(info, _fast("70b-4xh100"), text, num_blocks=8), text


def _digest(*token_ids: int) -> int:
    return PrefixReader().read(token_ids, 0).digest()


def test_a_drafter_reads_one_long_prompt_a_pass() -> None:
    """As one with a model does (workers/drafting/kinds/model/proposer.py)."""
    guess, clock = Guess(0.5, 0.0, 1), DeviceClock()
    proposer = ReplayProposer(1000, _fast("1b-h100"), ReplayText(500), guess, clock)
    desk = DraftingDesk(proposer, max_sequences=4)
    session = desk.open_session()
    for sequence_id, length in ((1, 40), (2, 40), (3, 4)):
        spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=length)
        assert session.open(sequence_id, spec, [100] * length) is None
        session.grant(sequence_id, Grant(until_position=100))
    drafted = [
        {one.sequence_id for news in desk.run_pass() for one in news.proposals} for _ in range(2)
    ]
    assert drafted == [{1, 3}, {1, 2, 3}]


@pytest.mark.parametrize("grant", [Grant(40), Grant(40, fan_out=6, nodes=200)])
def test_a_parallel_drafter_gives_several_tokens_after_each_node(grant: Grant) -> None:
    """In the time of one pass over all rows. With each further one it is right less often."""

    class Noted:
        seconds = 0.0

        def now(self) -> float:
            return 0.0

        def finish(self, begin: float, seconds: float) -> float:
            self.seconds = seconds
            return begin + seconds

    profile, text, guess, clock = load_profile("pard-1b-h100"), ReplayText(500), Guess(0.9), Noted()
    proposer = ReplayProposer(1000, profile, text, guess, clock)
    assert profile.tokens_a_pass == 8
    desk = DraftingDesk(proposer, max_sequences=1)
    session = desk.open_session()
    tried, right = [0] * 8, [0] * 8
    for number in range(300):
        spec = SequenceSpec(SamplingParams(), seed=number, prompt_length=4)
        assert session.open(1, spec, [100, 101, 102, 103 + number]) is None
        session.grant(1, grant)
        desk.run_pass()
        desk.check_integrity()
        tree = session.trees[1]
        chain = tree.chain_nodes()
        assert len(chain) == 8 if not grant.fan_out else len(chain) > 4
        assert clock.seconds * 1000 == pytest.approx(profile.pass_ms.ms(1, 4 + 7))
        reader = PrefixReader().read(tree.committed, 0)
        for place, node in enumerate(chain):
            token_id = text.next_token(reader.digest(), spec)
            tried[place] += 1
            right[place] += tree.tokens[node] == token_id
            if tree.tokens[node] != token_id:
                break
            reader.read((token_id,), 4 + place)
        if not number and grant.fan_out:
            desk.run_pass()
            desk.check_integrity()
            branches = [node for node in tree.children(0)[1:] if len(tree.children(node))]
            assert branches, "one pass continues the branches as well"
    # 300 and some 180 trials: standard errors of .02 and .03.
    assert right[0] / tried[0] == pytest.approx(0.9, abs=0.06)
    assert right[4] / tried[4] == pytest.approx(0.9 * 0.98**4, abs=0.1)


def test_rows_are_read_through_the_block_table(info: CheckpointInfo) -> None:
    engine, _ = _engine(info)
    prompt = list(range(50, 50 + BLOCK_SIZE + 3))
    table = [5, 2]
    assert engine.step([Slice(table, 0, prompt[:10], 0)]).digests == []
    rows = engine.step([Slice(table, 10, prompt[10:], 2)]).digests
    assert rows == [_digest(*prompt[:-1]), _digest(*prompt)]
    # Another sequence overwrites the first block, so reading there gives another text.
    engine.step([Slice([5], 0, [999], 1)])
    rows = engine.step([Slice(table, len(prompt), [77], 1)]).digests
    assert rows != [_digest(*prompt, 77)]


def test_a_tree_sees_ancestors_and_needs_its_moves(info: CheckpointInfo) -> None:
    engine, _ = _engine(info)
    table = [3]
    engine.step([Slice(table, 0, [60, 61], 0)])
    # 62 is the last committed token; 70 and 71 are siblings, 80 follows 71.
    piece = Slice(table, 2, [62, 70, 71, 80], 4, tree_start=3, parents=(0, 0, 2))
    rows = engine.step([piece]).digests
    below = (60, 61, 62)
    assert rows == [
        _digest(*path) for path in (below, (*below, 70), (*below, 71), (*below, 71, 80))
    ]
    # 71 and 80 are accepted, 90 follows.
    wrong = engine.step([Slice(table, 5, [90], 1)]).digests
    assert wrong != [_digest(*below, 71, 80, 90)]
    engine.step([piece])
    engine.move_kv([(table, [(4, 3), (5, 4)])])
    right = engine.step([Slice(table, 5, [90], 1)]).digests
    assert right == [_digest(*below, 71, 80, 90)]


def test_a_relay_delays_each_way_and_passes_the_end_on() -> None:
    with socket.create_server((HOST, 0)) as listener:
        relay = Relay(f"{HOST}:{listener.getsockname()[1]}", LinkProfile(rtt_ms=40))
        host, _, port = relay.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=120) as near:
            far, _ = listener.accept()
            with far:
                for sender, receiver in ((near, far), (far, near)):
                    began = time.perf_counter()
                    sender.sendall(b"ping")
                    assert receiver.recv(100) == b"ping"
                    assert time.perf_counter() - began >= 0.02
                near.shutdown(socket.SHUT_WR)
                assert far.recv(100) == b""
        relay.close()


def test_guesses_are_read_or_refused() -> None:
    assert parse_guess("0.75/0.85/1") == Guess(0.75, 0.85, 1)
    for text in ("0.75", "a/b/c", "0.75/0.85"):
        with pytest.raises(ConfigError, match="expected a guess"):
            parse_guess(text)
