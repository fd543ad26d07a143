"""Models that only answer, whole on a device or cut over the ranks of a group: one interface for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conveyor.models.adapters import adapters_off, carried

R = TypeVar("R")


class Answering(Protocol):
    """A model in a score worker; of one that is cut, every rank makes the same calls."""

    model: PreTrainedModel

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`function(model, *args, **kwargs)` without gradients."""
        ...

    def overwrite(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put named full tensors in the place of the model's; of one with adapters, in theirs. Tied weights may come under any name.

        Raises:
            RuntimeError: a weight of the model never came, or one came that it does not have.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor on CPU) of what `overwrite` takes, tied weights once; valid until the next one is asked for."""
        ...


class WithoutAdapter:
    """A model that is being trained, as it was before: its adapter is off while it answers. It never changes, so nothing is installed.

    Args:
        engine: has `model`, and `forward` as `TrainEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self.model: PreTrainedModel = engine.model
        self._engine = engine

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        with torch.no_grad(), adapters_off(self.model):
            found: R = self._engine.forward(function, *args, **kwargs)
        return found

    def overwrite(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError("the base never changes")

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


class WholeModel:
    """A model that its device holds whole."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        moved: Any = model  # transformers types `to` as of another class
        self.model: PreTrainedModel = moved.to(device).eval().requires_grad_(False)

    def forward(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        with torch.inference_mode():
            return function(self.model, *args, **kwargs)

    def overwrite(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = carried(self.model)
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
        names = carried(self.model)
        for name, parameter in self.model.named_parameters():
            if name in names:
                yield name, parameter.detach().cpu()
