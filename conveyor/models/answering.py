"""Models that only answer, whole on a device or cut over the ranks of a group: one interface for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

R = TypeVar("R")


class Answering(Protocol):
    """A model in a score worker; of one that is cut, every rank makes the same calls."""

    model: PreTrainedModel

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`function(model, *args, **kwargs)` without gradients."""
        ...

    def overwrite(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put named full tensors in the place of the model's. Tied weights may come under any of their names.

        Raises:
            RuntimeError: a weight of the model never came, or one came that it does not have.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor on CPU), tied weights once; valid until the next one is asked for."""
        ...


class WholeModel:
    """A model that its device holds whole."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        moved: Any = model  # transformers types `to` as of another class
        self.model: PreTrainedModel = moved.to(device).eval().requires_grad_(False)

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        with torch.inference_mode():
            return function(self.model, *args, **kwargs)

    def overwrite(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters(remove_duplicate=False))
        missing = {id(parameter): name for name, parameter in own.items()}
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise RuntimeError(f"the model has no weight {name}")
                own[name].copy_(tensor)
                missing.pop(id(own[name]), None)
        if missing:
            raise RuntimeError(f"weights never came: {', '.join(sorted(missing.values()))}")

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().cpu()
