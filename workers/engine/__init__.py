"""A checkpoint, loaded: its KV blocks, and the step that feeds tokens and gives rows of logits.

open.py           the one place that chooses between the CPU's engine and a GPU's
device.py         the kinds of devices that it is told
ahead.py          what it would refuse, asked before a process starts
engine.py         the engine on a CPU; cuda/: on a GPU
slices.py         what a step is asked to feed of a sequence
tensor_parallel/  a model cut into ranks, and how they add up

What is loaded:
checkpoint.py         a folder, looked at and refused in plain words
stored_tensors.py     its tensors, of which parts are read
quantisation.py       those whose weights are quantised
model.py              Hugging Face's model, made without memory
rank_parts.py         and filled linear by linear
weight_form.py, linears.py, half_linear.py, quantised_linears.py, mixtures.py   a CPU's linears
fusing.py             fewer and larger operations, the same bits
host_memory.py        whether there is room

A step on a CPU:
step_plan.py, block_runs.py   what every layer must know, computed once
attention.py      attention over KV blocks
kv_cache.py       the buffers; kv_sizes.py: how large; block_pool.py: who holds which block
forward.py        Hugging Face's own code, or a lean equivalent
layer_operations.py   what the lean one does between products: torch's way; a GPU's kernels in cuda/
invariance.py, self_test.py   a row's bits do not depend on its company
thread_choice.py  how many threads help at this moment
shared_blocks.py  blocks that several sequences read: what begins alike is computed once
local_cache.py    sequences whose KV a drafter keeps by itself
"""
