"""Mixtures of experts on a CPU: each expert's matrices become linears of the engine.

In Hugging Face's code the experts are one stacked parameter. The bits of their products, and of the
router's, depend on the number of tokens. With the engine's linears, and a router that always gets
the same number of rows, a token's bits do not depend on other tokens. self_test.py checks this on
each machine.

Shapes: T tokens, N features, E experts, K experts chosen for a token, M inner width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workers.engine.cpu.linears import make_linear
from workers.engine.options import WeightForm

_ROUTED_ROWS = 16


class PackedExperts(nn.Module):
    """Replaces a module that holds gate_up_proj [E, 2M, N] and down_proj [E, N, M]."""

    def __init__(self, source: nn.Module, form: WeightForm) -> None:
        super().__init__()
        gate_up_E2MN, down_ENM = source.gate_up_proj, source.down_proj
        assert isinstance(gate_up_E2MN, Tensor)
        assert isinstance(down_ENM, Tensor)
        self.act_fn = source.act_fn
        self.gate_up = nn.ModuleList(_linear(weight, form) for weight in gate_up_E2MN)
        self.down = nn.ModuleList(_linear(weight, form) for weight in down_ENM)

    def forward(self, rows_TN: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
        """For each token, the sum of its experts' results times their shares, by expert number."""
        total_TN = torch.zeros_like(rows_TN)
        activation: Any = self.act_fn
        for expert in experts_TK.unique().tolist():
            tokens, places = torch.nonzero(experts_TK == expert, as_tuple=True)
            gate, up = self.gate_up[expert](rows_TN[tokens]).chunk(2, dim=-1)
            result = self.down[expert](activation(gate) * up)
            shares = shares_TK[tokens, places, None]
            total_TN.index_add_(0, tokens, (result * shares).to(total_TN.dtype))
        return total_TN


class EvenRouter(nn.Module):
    """A router that always gets 16 rows."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The router's results for all rows."""
        rows_TN = rows.reshape(-1, rows.shape[-1])
        padded = nn.functional.pad(rows_TN, (0, 0, 0, -rows_TN.shape[0] % _ROUTED_ROWS))
        parts = [self.router(piece) for piece in padded.split(_ROUTED_ROWS)]
        return tuple(torch.cat(part)[: rows_TN.shape[0]] for part in zip(*parts, strict=True))


def holds_experts(module: nn.Module) -> bool:
    """Whether the module has the stacked matrices of experts."""
    stacked = getattr(module, "gate_up_proj", None)
    return isinstance(stacked, Tensor) and stacked.dim() == 3


def replace_experts_of(module: nn.Module, form: WeightForm) -> None:
    """Replace the experts and the router among the direct children of `module`."""
    for name, child in list(module.named_children()):
        if holds_experts(child):
            setattr(module, name, PackedExperts(child, form))
        elif hasattr(child, "top_k") and isinstance(getattr(child, "weight", None), Tensor):
            setattr(module, name, EvenRouter(child))


def _linear(weight_MN: Tensor, form: WeightForm) -> nn.Module:
    linear = nn.Linear(weight_MN.shape[1], weight_MN.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_MN, requires_grad=False)
    return make_linear(linear, form)
