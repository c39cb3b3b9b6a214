"""The engine for GPUs: paged attention by torch's varlen_attn, and steps replayed as CUDA graphs.

Everything here but that kernel and the graphs runs on a CPU as well, where a reference attention
stands in for the kernel: that is how its tests prove it where there is no GPU. Kernels of our own,
for attention and for what lies between products, run where they are asked for (workers/kernels.py).
"""
