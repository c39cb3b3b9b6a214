"""The contract of a step on a GPU, checked on torch's meta device without a GPU.

Tensors of the meta device have shapes and types but no values, and do not mix with others. So a
step that runs on them takes all its data from the device, and asks the device for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMES = (
    "query",
    "key",
    "value",
    "cu_seq_q",
    "cu_seq_k",
    "max_q",
    "max_k",
    "is_causal",
    "scale",
    "window_size",
    "enable_gqa",
    "seqused_k",
    "block_table",
    "num_splits",
)
_DEFAULTS = {"is_causal": False, "num_splits": None, "seqused_k": None, "block_table": None}


class DeviceAlone(TorchDispatchMode):
    """Refuses operations with data of the host, as a captured graph must; and checks kernel calls.

    `calls`: the arguments of every call of the attention kernel, by name. `names`: the names of all
    operations.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.calls: list[dict[str, Any]] = []
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = kwargs or {}
        given = [one for one in tree_leaves((args, named)) if isinstance(one, Tensor)]
        strangers = [tuple(one.shape) for one in given if one.device.type != "meta" and one.dim()]
        if strangers:
            raise AssertionError(f"{func} takes data from the host, of shapes {strangers}")
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] == "_varlen_attn":
            call = _DEFAULTS | dict(zip(_NAMES, args, strict=False)) | named
            check_call(call)
            self.calls.append(call)
        return func(*args, **named)


def check_call(call: dict[str, Any]) -> None:
    """Raise on what torch 2.13's CUDA code refuses or computes wrongly (`mha_varlen_fwd`)."""
    query, key, value, table = (call[name] for name in ("query", "key", "value", "block_table"))
    num_sequences = call["cu_seq_q"].shape[0] - 1
    assert num_sequences > 0
    assert query.dtype in (torch.float16, torch.bfloat16), query.dtype
    assert query.dtype == key.dtype == value.dtype
    num_tokens, num_heads, head_size = query.shape
    assert head_size <= 256
    assert head_size % 8 == 0
    assert num_heads % key.shape[2] == 0
    assert key.shape == value.shape == (key.shape[0], key.shape[1], key.shape[2], head_size)
    assert key.shape[1] % 256 == 0, "pages are of a multiple of 256 positions"
    for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
        assert call[name] is not None, f"{name} must be there: cu_seq_k too, beside cu_seq_q"
        assert call[name].dtype == torch.int32, name
    for name in ("cu_seq_q", "cu_seq_k"):
        assert call[name].shape == (num_sequences + 1,), name
        assert call[name].is_contiguous(), name
    assert call["seqused_k"].shape == (num_sequences,)
    assert call["seqused_k"].is_contiguous()
    assert table.shape[0] == num_sequences
    for one in (query, key, value, table):
        assert one.stride(-1) == 1
    assert call["num_splits"] == 1, "with split keys only the first sequence's rows are written"
    assert 1 < call["max_q"] <= max(2, num_tokens), "1 puts a group's heads into rows"
    assert call["max_k"] == table.shape[1] * key.shape[1]
