"""A loaded checkpoint: its KV blocks, and the step that feeds tokens and returns logits.

open.py           the one place that chooses between the CPU's engine and a GPU's
device.py         the kinds of devices
ahead.py          checks that need no process: what an engine would refuse
engine.py         the engine on a CPU; cuda/: on a GPU
slices.py         what a step feeds of a sequence
tensor_parallel/  a model cut into ranks, and their collectives

Loading:
checkpoint.py         inspects a folder, and refuses it in plain words
stored_tensors.py     its tensors, which can be read in parts
quantisation.py       quantized weights
model.py              Hugging Face's model, made without memory
rank_parts.py         fills it with a rank's weights, linear by linear
weight_form.py, linears.py, half_linear.py, quantised_linears.py, mixtures.py   a CPU's linears
fusing.py             fewer and larger operations with the same bits
host_memory.py        whether memory suffices

A step on a CPU:
step_plan.py, block_runs.py   what every layer needs, computed once
attention.py      attention over KV blocks
kv_cache.py       the buffers; kv_sizes.py: their sizes; block_pool.py: who holds which block
forward.py        Hugging Face's own code, or a lean equivalent
layer_operations.py   the lean code between products in torch; a GPU's kernels are in cuda/
invariance.py, self_test.py   a row's bits do not depend on the other rows
thread_choice.py  how many threads help at the moment
shared_blocks.py  blocks that several sequences read: common prefixes are computed once
local_cache.py    sequences whose KV a drafter manages by itself
"""
