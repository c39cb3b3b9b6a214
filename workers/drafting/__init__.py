"""What proposes: sequences with the trees drafted after them, and the kinds that grow them.

tree.py       one sequence: committed tokens, drafted nodes, grant
proposer.py   the interface of a kind
model.py, ngram.py, recycling.py   the kinds
branches.py   several guesses as one tree
stopping.py   when to draft no further
desk.py       the open sequences of all streams, and passes over them
excerpt.py    what of a tree a proposal shows

Of the model drafter:
growth.py     how a tree grows, rule by rule
allocation.py where nodes are spent
chances.py    how likely candidates are to be accepted, learned from outcomes
draw.py       the candidates under a node
stopper.py    a sequence's stopping rule and what it looks at
tree_kv.py    which slot of the KV memory holds which node
"""
