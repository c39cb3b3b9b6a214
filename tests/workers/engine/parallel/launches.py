"""Launches of the kernels between ranks as models make them, for compiling.py; nothing runs."""

from __future__ import annotations

import torch

from workers.engine.cuda.linears import Rounding
from workers.engine.parallel.peer_kernels import (
    NUM_SLOTS,
    Table,
    gather,
    sum_add_and_norm,
    sum_rows,
)


def launch_sums() -> None:
    """Launch sums of a 70 B Llama's rows in bfloat16, and of smaller rows in float32."""
    for dtype, size, degree in ((torch.bfloat16, 8192, 4), (torch.float32, 904, 3)):
        rows = torch.empty(64, size, dtype=dtype, device="meta")
        weight_N = torch.empty(size, dtype=dtype, device="meta")
        addresses = torch.empty(degree + 1, dtype=torch.int64, device="meta")
        epochs = torch.empty(NUM_SLOTS + 1, dtype=torch.int64, device="meta")
        table = Table(addresses, epochs, rank=1, degree=degree, part_bytes=16384)
        sum_rows(table, rows, 1)
        sum_rows(table, rows, 64)
        sum_add_and_norm(table, rows, rows, 9, weight_N, 1e-5)
        many = torch.empty(1024, size, dtype=dtype, device="meta")
        sum_rows(table, many, 1000)
        for rounding in (Rounding(), Rounding(8)):
            sum_add_and_norm(table, many, many, None, weight_N, 1e-5, rounding)
        for count in (1, 144):
            gather(table, torch.empty(count, dtype=torch.int64, device="meta"))
