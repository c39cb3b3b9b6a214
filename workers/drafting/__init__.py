"""What proposes: sequences with the trees drafted after them, and the kinds that grow them.

tree.py       one sequence: committed tokens, drafted nodes, grant
proposer.py   the interface of a kind
model.py, ngram.py   the kinds
stopping.py   when to draft no further
desk.py       the open sequences of all streams, and passes over them
excerpt.py    what of a tree a proposal shows
"""
