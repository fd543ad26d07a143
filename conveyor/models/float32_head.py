"""An output layer whose products are float32, of hidden states and weights that are bfloat16.

A bfloat16 matrix product rounds every logit to 8 bits: after 20 comes 20.125, and a log-prob can be no closer than that. Products of two
bfloat16 numbers are exact in float32, so only the rounding of states and weights is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SLICE = 2**24
"""Elements of the weight that are held in float32 at a time, on a CPU: 64 MiB."""


def float32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [..., V]: hidden [..., H] times weight [V, H], plus bias [V]. Gradients are a plain layer's, in the inputs' types."""
    if hidden.dtype == weight.dtype == torch.float32:
        return F.linear(hidden, weight, bias)
    logits: Tensor = _Float32Linear.apply(hidden.flatten(0, -2), weight).unflatten(0, hidden.shape[:-1])
    return logits if bias is None else logits + bias.float()


class _Float32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [N, H], weight [V, H] → [N, V]"""
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        states, step = hidden.float(), max(1, SLICE // weight.shape[1])
        logits = states.new_empty(len(hidden), len(weight))
        for first in range(0, len(weight), step):  # the vocabulary in slices: the whole weight in float32 would be twice its size
            logits[:, first : first + step] = states @ weight[first : first + step].float().T
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        of_hidden, of_weight = ctx.needs_input_grad
        return gradient @ weight if of_hidden else None, gradient.T @ hidden if of_weight else None
