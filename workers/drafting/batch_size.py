"""Size limits of a drafter's messages, for drafters that send and drivers that read them.

A driver reads a message on the event loop that runs its steps, so one message must keep it busy
only briefly. The limits are those of drafting.proto, ProposalBatch.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.v1 import drafting_pb2

MAX_ENTRIES = 2048
"""Maximum number of entries in a batch. A driver reads this number of the slowest kind in less than
10 ms on an idle core, and in less than 20 ms on a busy one. Our largest proposal has 1,703 entries:
129 nodes, the most that are granted, with 64 pairs each.
"""

MAX_RESPONSE_BYTES = 256 * 1024
"""Maximum size of a DraftResponse. MAX_ENTRIES entries take some 200 KiB at most. Parsing the worst
case of 256 KiB (empty proposals) takes 12 ms.
"""

_PROPOSAL_ENTRIES, _PROPOSAL_OF_DRAWS_ENTRIES = 2, 14
_DISTRIBUTION_ENTRIES, _PAIRS_AN_ENTRY = 8, 16

Told = drafting_pb2.Proposal | drafting_pb2.Tips


def num_entries(told: Told) -> int:
    """The work of reading a proposal or tips, counted in entries as drafting.proto defines them."""
    if isinstance(told, drafting_pb2.Tips):
        columns = (told.token_ids, told.base_lengths, told.base_hashes, told.sequence_ids)
        return max(1, len(told.last_of), *map(len, columns))
    entries = _PROPOSAL_OF_DRAWS_ENTRIES if told.distributions else _PROPOSAL_ENTRIES
    entries += max(len(told.token_ids), len(told.parents), len(told.multiplicities))
    entries += len(told.stopping_state)
    for one in told.distributions:
        pairs = max(len(one.token_ids), len(one.probabilities))
        entries += _DISTRIBUTION_ENTRIES + pairs // _PAIRS_AN_ENTRY
    return entries


def count_entries(batch: drafting_pb2.ProposalBatch) -> int:
    """The number of entries in a batch. Counting stops once the number exceeds MAX_ENTRIES."""
    entries = len(batch.proposals) + len(batch.tips)
    if entries > MAX_ENTRIES:
        return entries
    entries = 0
    told: list[Told] = [*batch.proposals, *batch.tips]
    for one in told:
        entries += num_entries(one)
        if entries > MAX_ENTRIES:
            break
    return entries


def in_batches(told: Iterable[Told]) -> list[list[Told]]:
    """Split what a pass tells, in order, into lists that each fit into a batch; at least one."""
    batches: list[list[Told]] = [[]]
    room = MAX_ENTRIES
    for one in told:
        entries = num_entries(one)
        if entries > room:
            batches.append([])
            room = MAX_ENTRIES
        batches[-1].append(one)
        room -= entries
    return batches
