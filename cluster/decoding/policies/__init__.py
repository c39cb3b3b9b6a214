"""The lookahead policies of this repository, a file each (lookahead.py)."""
