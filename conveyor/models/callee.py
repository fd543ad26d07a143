"""The module that DeepSpeed sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Callee(nn.Module):
    """Runs any function of the model, so that all computation happens inside DeepSpeed's forward, where ZeRO-3 has its hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, function: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs) if function is None else function(self.model, *args, **kwargs)
