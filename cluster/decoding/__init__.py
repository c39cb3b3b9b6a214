"""Every decision of a driver, without I/O and without a clock: events in, instructions out.

scheduler.py      the door: an event in, what to do now out
events.py, instructions.py   what comes in and goes out
state.py          what the scheduler owns

A sequence:
sequence.py       all that is known of one
token_tree.py     its committed tokens, the candidates after them (candidates.py)
windows.py        what a step verifies
held_kv.py        its KV on a target group
counts.py, totals.py   what is counted

Time:
timings.py        how long steps, passes and the driver's work take; how busy devices were

A target group:
group.py          what runs there, and its step in flight
residents.py, waiting.py     who runs, who waits, who gives blocks back
prefix_cache.py   the blocks, and those that sequences share
batching.py, prefill.py      a step: who is in it, and how much prefill, by what that adds
answers.py, verdicts.py      what its answer does
replicas.py       one sequence on several groups
suspects.py       who may have ended it: tried alone

Drafters:
drafters.py, roster.py       who drafts for whom, and what they are told
proposals.py      where what they send goes

Policies:
lookahead.py, draft_view.py   what a policy looks at and answers
policies.py       each of them
auto.py           the one that chooses among them, by choices.py, cohorts.py, options.py, pilot.py,
                  forecast.py, outlook.py, beliefs.py and hits.py
"""
