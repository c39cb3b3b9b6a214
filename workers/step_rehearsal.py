"""Going through the motions of a step before it comes.

A shard that has answered waits for the next step with caches that others' work has emptied while
its device computed: to check a step then takes ten times as long as it should. So it reads and
checks one that nobody sent, while the answer is on its way (docs/performance/lookahead.md).
"""

from __future__ import annotations

from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2
from paceline.wire import spec_to_wire
from workers.target_session import EngineLimits, TargetSession

WORTH_SECONDS = 0.005
"""Steps that take less find their code where it was."""

_CHAIN, _TREE = 1, 2
_BLOCK_SIZE, _NUM_BLOCKS, _START = 16, 4, 24
_TREE_PARENTS = (0, 0, 1)


class StepRehearsal:
    """A session of its own with two sequences: one is fed a chain, the other a tree."""

    def __init__(self) -> None:
        self._session = TargetSession(
            EngineLimits(
                vocab_size=_NUM_BLOCKS * _BLOCK_SIZE,
                max_model_len=_NUM_BLOCKS * _BLOCK_SIZE,
                block_size=_BLOCK_SIZE,
                num_blocks=2 * _NUM_BLOCKS,
            )
        )
        spec = SequenceSpec(
            SamplingParams(temperature=0.0), seed=0, prompt_length=_START, rule=Rule.COUPLED
        )
        self._request = target_pb2.StepRequest(step=1)
        for sequence_id in (_CHAIN, _TREE):
            first = (sequence_id - 1) * _NUM_BLOCKS
            self._request.open.add(sequence_id=sequence_id, spec=spec_to_wire(spec))
            self._request.slices.add(
                sequence_id=sequence_id,
                token_ids=range(_START),
                verdict=True,
                new_blocks=range(first, first + _NUM_BLOCKS),
            )

    def run(self) -> None:
        """Read and check a step. Nothing is accepted, so the next begins where it began."""
        self._session.begin_step(
            target_pb2.StepRequest.FromString(self._request.SerializeToString())
        )
        next_step = target_pb2.StepRequest(step=self._request.step + 1)
        for sequence_id, parents in ((_CHAIN, ()), (_TREE, _TREE_PARENTS)):
            next_step.slices.add(
                sequence_id=sequence_id,
                start=_START,
                token_ids=range(1 + len(_TREE_PARENTS)),
                window=len(_TREE_PARENTS),
                verdict=True,
                parents=parents,
            )
        self._request = next_step

    def check_integrity(self) -> None:
        """Assert the invariants of its session. For tests."""
        self._session.check_integrity()
