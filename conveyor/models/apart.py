"""Gradient sums kept beside DeepSpeed's, and mixed into one gradient when their coefficients are known.

What whitening over the update needs while it streams: at ratio 1 the policy gradient is linear in the advantages, so

    Σ (A − μ)/σ · ∇log π  =  1/σ · Σ A ∇log π  −  μ/σ · Σ ∇log π

and the two sums on the right need neither μ nor σ, which only the whole update tells. Where |μ| is much larger than σ the right side is a
small difference of large sums, so advantages are taken relative to some c near μ, which each rank may choose for itself:

    Σ (A − μ)/σ · ∇log π  =  1/σ · Σ (A − c) ∇log π  −  (μ − c)/σ · Σ ∇log π
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class ApartGradients:
    """Named gradient sums of a model on one rank: full, unpartitioned, float32."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: dict[str, list[Tensor | None]] = {}

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Add the gradient of each loss (scalars of one graph) to the sum of its name."""
        for place, (name, loss) in enumerate(losses.items(), start=1):
            found = torch.autograd.grad(loss, self._parameters, retain_graph=place < len(losses), allow_unused=True)
            sums = self._sums.setdefault(name, [None] * len(found))
            for i, gradient in enumerate(found):
                if gradient is not None:
                    known = sums[i]
                    sums[i] = gradient.detach().float() if known is None else known.add_(gradient)

    def mixed(self, coefficients: Mapping[str, float]) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter, Σ coefficient · sum) for every parameter; forgets the sums. Names without a coefficient count as 0."""
        pairs = []
        for i, parameter in enumerate(self._parameters):
            total: Tensor | None = None
            for name, sums in self._sums.items():
                gradient, sums[i] = sums[i], None  # given away, so that only what is still needed is held
                if gradient is not None and name in coefficients:
                    scaled = gradient.mul_(coefficients[name])
                    total = scaled if total is None else total.add_(scaled)
            pairs.append((parameter, torch.zeros_like(parameter, dtype=torch.float32) if total is None else total))
        self._sums.clear()
        return pairs


def linear(_: Any, pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
    """A scalar whose gradient is the given one: what reduces gradients over ranks reduces it like any other."""
    return torch.stack([(parameter * gradient.to(parameter.dtype)).sum().float() for parameter, gradient in pairs]).sum()
