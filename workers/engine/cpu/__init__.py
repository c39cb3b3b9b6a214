"""The engine on a CPU: KV buffers, linears in each number format, the choice of threads."""
