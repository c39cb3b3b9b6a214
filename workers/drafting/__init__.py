"""The drafter: sequences with the trees drafted after them, and the kinds that grow them.

nodes.py      committed tokens and the nodes drafted after them: their shape
tree.py       one sequence: its nodes, and what may be drafted for it now
proposer.py   the interface of a kind
model.py, ngram.py, recycling.py   the kinds; recycled_rows.py: what the last one remembers
branches.py   guesses made without a draw, merged into one tree
stopping.py   when to stop drafting; acceptance_map.py: estimates of acceptance for that
desk.py       the open sequences of all streams, and passes over them
rhythm.py     when to hold a pass back for the outcomes that are about to come
excerpt.py    the part of a tree that a proposal shows; proposal.py: the proposal;
              telling.py: the proposals of a pass; wire.py: their messages;
              batch_size.py: the limits on message sizes

Of the model drafter:
growth.py     how a tree grows, rule by rule
expansions.py what was drawn under each node, and which of it was sent
allocation.py where nodes are spent; loose_ends.py: the choices for that;
              fan_out.py: the choices among other outcomes
chances.py    how likely candidates are to be accepted, learned from outcomes
draw.py       the candidates under a node; device_rows.py: from logits on a GPU
stopper.py    a sequence's stopping rule and the signals that it looks at
tree_kv.py    which slot of the KV memory holds which node
"""
