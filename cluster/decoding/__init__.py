"""All decisions of a driver, without I/O and without a clock: events in, instructions out.

scheduler.py      the entry: takes an event, returns instructions
events.py, instructions.py   the scheduler's input and output
state.py          what the scheduler owns

A sequence:
sequence.py       all that is known of one sequence
token_tree.py     its committed tokens and the candidates after them (candidates.py)
windows.py        what a step verifies
held_kv.py        its KV on a target group
counts.py, totals.py, utilisation.py   counts for statistics

A target group:
group.py          the sequences that run there, and its step in flight
residents.py, waiting.py     who runs, who waits, who gives blocks back
prefix_cache.py   the blocks, and which of them sequences share
batching.py, prefill.py      a step: its sequences, and how much prefill it holds
prefill_price.py  what prefill adds to a step's time
answers.py, verdicts.py      how the answer to a step is handled
replicas.py       one sequence on several groups
suspects.py       sequences that may have ended the target, which are tried alone

Drafters:
drafters.py, roster.py       who drafts for whom, and what drafters are told
driver_share.py   how many chains the driver has time for
proposals.py      where the candidates go that drafters send
step_costs.py     what drafters must know of steps to stop by cost

Policies:
lookahead.py, draft_view.py   what a policy sees and answers
policies.py       the policies
auto.py           the controller that chooses a policy, with choices.py, cohorts.py, options.py,
                  pilot.py, forecast.py, outlook.py, beliefs.py, hits.py, estimates.py and
                  step_model.py
"""
