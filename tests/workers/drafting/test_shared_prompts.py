"""Prompts that share most of their blocks fit where separate ones would not."""

from __future__ import annotations

from random import Random

from tests.workers.drafting.long_prompts import SIZE, kv_of, spec, tokens
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.tree import Grant
from workers.engine.cpu.engine import CpuEngine


def _drafts_of_ten(
    engine: CpuEngine, *, prefix_cache: bool, orders: Random
) -> tuple[dict[int, int], int]:
    """Open ten prompts of four blocks together, three of them shared. They end in any order.

    Returns the token drafted for each, and the maximum number of held blocks.
    """
    random = Random(7)
    shared = tokens(random, 3 * SIZE)
    prompts = [[*shared, *tokens(random, 20)] for _ in range(10)]
    desk = DraftingDesk(ModelProposer(engine, prefix_cache=prefix_cache), max_sequences=10)
    session = desk.open_session()
    for number, prompt in enumerate(prompts):
        assert session.open(number, spec(len(prompt)), prompt) is None
        session.grant(number, Grant(len(prompt) + 1))
    most = 0
    drafted: dict[int, int] = {}
    gone: set[int] = set()
    while desk.has_work:
        for news in desk.run_pass():
            drafted |= {one.sequence_id: one.token_ids[0] for one in news.proposals}
            gone |= {one.sequence_id for one in news.declined}
        most = max(most, _blocks_held(desk))
        if drafted and orders.random() < 0.3:  # while others wait, are fed, or are through
            number = orders.choice(sorted(session.trees))
            session.close(number)
            gone.add(number)
        desk.check_integrity()
    assert {*drafted, *gone} == set(range(10))
    desk.close_session(session)
    desk.check_integrity()
    assert _blocks_held(desk) == 0
    return drafted, most


def _blocks_held(desk: DraftingDesk) -> int:
    return len({block for kv in kv_of(desk).values() for block in kv.block_table})


class _Never(Random):
    def random(self) -> float:
        return 1.0


def test_prompts_that_share_most_fit_where_all_their_blocks_would_not(
    long_engine: CpuEngine,
) -> None:
    """There are fifteen blocks. The prompts need forty, or thirteen if three are shared."""
    drafted, most = _drafts_of_ten(long_engine, prefix_cache=True, orders=_Never())
    assert (len(drafted), most) == (10, 3 + 10)
    for seed in range(20):
        some, held = _drafts_of_ten(long_engine, prefix_cache=True, orders=Random(seed))
        assert held <= 3 + 10
        assert some.items() <= drafted.items(), "drafts depend on who ends when"
    alone, most = _drafts_of_ten(long_engine, prefix_cache=False, orders=_Never())
    assert (len(alone), most) == (3, 12), "without it the others are declined at their turn"
    assert alone.items() <= drafted.items()


def test_a_prompt_waits_without_blocks_and_is_declined_at_its_turn(long_engine: CpuEngine) -> None:
    random = Random(8)
    desk = DraftingDesk(ModelProposer(long_engine), max_sequences=9)
    session = desk.open_session()
    for number in range(5):  # of four blocks each
        prompt = tokens(random, 3 * SIZE + 1)
        assert session.open(number, spec(len(prompt)), prompt) is None
        session.grant(number, Grant(len(prompt) + 1))
    assert _blocks_held(desk) == 0
    declined: list[int] = []
    while desk.has_work:
        for news in desk.run_pass():
            declined += [one.sequence_id for one in news.declined if "KV memory" in one.reason]
            if declined == [3]:
                session.close(0)  # in time for the last one
        desk.check_integrity()
    assert declined == [3]
    assert all(len(session.trees[number].tokens) == 2 for number in (1, 2, 4))
    desk.close_session(session)
