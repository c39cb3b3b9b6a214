"""`paceline bench`: ratios measured in one run, with the peer beside us.

harness.py: what a suite is, measuring in turns, reports. processes.py: what is measured, as
processes; transformers_peer.py: transformers in one. A suite is a file that registers itself
(decode.py, rules.py, engine.py, lookahead.py); engine_*.py register its parts, lookahead_*.py are
its cells and what they run on, and record_replay.py makes the recording that they replay.
"""
