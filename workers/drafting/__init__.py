"""What proposes: sequences with the trees drafted after them, and the kinds that grow them.

nodes.py      committed tokens and the nodes drafted after them: their shape
tree.py       one sequence: its nodes, and what may be drafted for it now
proposer.py   the interface of a kind
model.py, ngram.py, recycling.py   the kinds; recycled_rows.py: what the last remembers
branches.py   guesses made without a draw, as one tree
stopping.py   when to draft no further
acceptance_map.py   how likely a drafted token is to be accepted, for that
desk.py       the open sequences of all streams, and passes over them
rhythm.py     when a pass is better held back for the outcomes that are about to come
excerpt.py    what of a tree a proposal shows; proposal.py: the proposal;
              telling.py: which are told of a pass; wire.py: as messages, of which
              batch_size.py says how large they may be

Of the model drafter:
growth.py     how a tree grows, rule by rule
expansions.py what was drawn node by node, and which of it was sent
allocation.py where nodes are spent; loose_ends.py: what there is to choose from;
              fan_out.py: on which other outcomes
chances.py    how likely candidates are to be accepted, learned from outcomes
draw.py       the candidates under a node; device_rows.py: from logits on a GPU
stopper.py    a sequence's stopping rule and what it looks at
tree_kv.py    which slot of the KV memory holds which node
"""
