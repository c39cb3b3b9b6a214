"""What proposes: sequences with their run-ahead, and the kinds that extend them.

path.py       one sequence: committed tokens, run-ahead, grant
proposer.py   the interface of a kind
model.py, ngram.py   the kinds
desk.py       the open sequences of all streams, and passes over them
"""
