"""Random schedules of every event: the text stays plain decoding's, nothing leaks or stalls."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    MalformedProposal,
    Paused,
    Proposal,
    Proposed,
    Resumed,
    Tick,
)
from cluster.decoding.policy import POLICIES, policy_named
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World

DRAFTERS = ("drafter-0", "drafter-1")
STEMS = (tuple(range(10, 20)), (*range(10, 14), *range(30, 36)))


class Fuzz:
    """Draws the next event from hypothesis, so that failures shrink."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        scheduler = Scheduler(
            max_num_seqs=3,
            max_step_tokens=self.draw(3, 24),
            wait_seconds=5,
            prefix_cache=self.draw(0, 3) > 0,
        )
        self.world = World(scheduler, num_blocks=self.draw(16, 44))
        self.held: list[Proposed] = []
        self.next_id = 1

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def guess(self, path: list[int], seed: int) -> int:
        wrong = self.draw(0, 3) == 0
        return self.draw(0, 49) if wrong else true_token(path, seed)

    def act(self) -> None:
        world = self.world
        world.now += self.draw(0, 3)
        name = DRAFTERS[self.draw(0, 1)]
        match self.draw(0, 14):
            case 0 | 1:
                # Whole blocks in common with others, of the same tenant or of another.
                stem = STEMS[self.draw(0, 1)][: self.draw(0, 10)]
                prompt = (*stem, *(1 + self.draw(0, 5) for _ in range(self.draw(1, 12))))
                policies = list(POLICIES)
                policy = policies[self.draw(0, len(policies) - 1)]
                needs = policy_named(policy).needs
                asked = request(
                    self.next_id,
                    prompt,
                    policy=policy,
                    window=self.draw(1, 8),
                    branches=1 if needs.chains_only else self.draw(1, 3),
                    tenant="ab"[self.draw(0, 1)],
                    merge=not needs.chains_only and needs.drafters < 2 and self.draw(0, 1) > 0,
                    prompt_logprobs=None if self.next_id % 3 else 0,
                )
                self.next_id += 1
                world.send(Admitted(world.now, asked))
            case 2:
                world.send(Cancelled(world.now, self.draw(1, self.next_id)))
            case 3:
                if name in world.drafters:
                    del world.drafters[name]
                    world.send(DrafterLost(world.now, name))
                else:
                    world.drafters[name] = PretendedDrafter(
                        self.guess, lambda count: self.draw(0, count - 1)
                    )
                    kind = ("model", "ngram")[self.draw(0, 1)]
                    joined = DrafterJoined(
                        world.now, name, self.draw(8, 60), kind=kind, has_model=kind == "model"
                    )
                    world.send(joined)
            case 4:
                if world.target_joined and self.draw(0, 2) == 0:
                    world.lose_target()
                elif not world.target_joined:
                    world.join_target()
            case 5:
                garbage = tuple(self.draw(0, 60) for _ in range(self.draw(0, 6)))
                which, base = self.draw(1, self.next_id), self.draw(0, 30)
                proposal = Proposal(which, base, self.draw(0, 2**64 - 1), garbage, True)
                world.send(Proposed(world.now, "nobody", (proposal,)))
            case 6:
                if name in world.drafters and self.draw(0, 3) == 0:
                    world.send(MalformedProposal(world.now, name))
                    for suspect in world.suspects:
                        world.drafters.pop(suspect, None)
                    world.suspects.clear()
            case 7:
                world.send(DraftDeclined(world.now, name, self.draw(1, self.next_id)))
            case 8 if self.held:
                # Late, out of order, or twice.
                late = self.held[self.draw(0, len(self.held) - 1)]
                world.send(Proposed(world.now, late.drafter, late.proposals))
            case 9 | 10 if name in world.drafters:
                message = Proposed(world.now, name, world.drafters[name].run_pass())
                self.held.append(message)
                if self.draw(0, 3):
                    world.send(message)
            case 11:
                world.send(Tick(world.now))
            case 12:
                which = self.draw(1, self.next_id)
                pauses = which not in world.paused
                world.send((Paused if pauses else Resumed)(world.now, which))
            case _:
                if world.step is not None:
                    world.answer()

    def drain(self) -> None:
        """Run until everything has ended."""
        world = self.world
        if not world.target_joined:
            world.join_target()
        for sequence_id in sorted(world.paused):
            world.send(Resumed(world.now, sequence_id))
        for _ in range(5000):
            for name in list(world.drafters):
                world.draft(name)
            if world.step is not None:
                world.answer()
            elif world.wake_at is not None and world.requests.keys() != world.ended:
                world.now = max(world.now, world.wake_at)
                world.wake_at = None
                world.send(Tick(world.now))
            else:
                break
        assert world.ended == world.requests.keys()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_schedules_keep_text_and_invariants(data: st.DataObject) -> None:
    fuzz = Fuzz(data)
    fuzz.world.join_target()
    for _ in range(data.draw(st.integers(5, 60))):
        fuzz.act()
    fuzz.drain()


def test_the_fuzzer_notices_a_wrong_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: candidates that survive a diverging verdict give wrong text."""

    right_commit = TokenTree.commit

    def careless_commit(tree: TokenTree, accepted: list[int], token_id: int) -> tuple[int, ...]:
        leaf = tree._pinned[accepted[-1]] if accepted else tree.root
        if leaf.children:
            token_id = leaf.children[0].token_id
        return right_commit(tree, accepted, token_id)

    monkeypatch.setattr(TokenTree, "commit", careless_commit)
    with pytest.raises(AssertionError):
        _draft_wrongly()


def _draft_wrongly() -> None:
    world = World(Scheduler())
    world.join_target()
    world.drafters["drafter-0"] = PretendedDrafter(lambda path, seed: 1)
    world.send(DrafterJoined(world.now, "drafter-0", 1000))
    world.send(Admitted(world.now, request(1, (1, 2, 3))))
    while not world.finished:
        world.draft("drafter-0")
        world.answer()
