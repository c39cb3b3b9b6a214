"""The engine for GPUs: paged attention by torch's varlen_attn, and steps replayed as CUDA graphs.

All of it but that kernel and the graphs runs on a CPU as well, where a reference attention replaces
the kernel: tests prove it this way without a GPU. Kernels of our own, for attention and for what
lies between products, run where they are enabled (workers/process/kernels.py).
"""
