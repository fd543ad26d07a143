"""What a method that learns from a fixed dataset is made of: a data form plus a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from conveyor.algorithms.metrics import Metrics

Item = TypeVar("Item")
"""What is trained as a whole: a packed row, a pair."""


class Task(Protocol[Item]):
    """One method with its data. The fit loop knows nothing else of either."""

    @property
    def items(self) -> Sequence[Item]:
        """The training set, in file order."""

    @property
    def eval_items(self) -> Sequence[Item]:
        """The held-out set, may be empty."""

    def load_model(self) -> PreTrainedModel:
        """The model to train, freshly loaded."""

    def denominator(self, item: Item) -> int:
        """What an item adds to the number that the update's summed loss is divided by (its loss tokens; 1 a pair)."""

    def tokens(self, item: Item) -> int:
        """Tokens of the forward pass, padding not counted."""

    def outputs(self, model: PreTrainedModel, items: Sequence[Item]) -> Tensor:
        """The forward pass: all that reads weights. Runs inside DeepSpeed's forward."""

    def loss(self, outputs: Tensor, items: Sequence[Item]) -> tuple[Tensor, Metrics]:
        """The loss summed over the items, and what to log. Pure."""
