"""What a method that learns from a fixed dataset is made of: a data form plus a loss.

    items ──▶ survey ──▶ context ──▶ outputs ──▶ loss
              of a whole update,      of a micro-batch,
              without gradient        with gradient

Losses are sums; the update's denominator is applied once, just before the optimizer step. What needs a whole update (KTO's KL, the
quantiles of AOT, BCO's shift) is a *context*, made before its first micro-batch from a pass without gradient over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Metrics
from conveyor.config import OfflineRecipe, sections
from conveyor.data.samples import Sample
from conveyor.models.language_model import load_language_model

State = dict[str, float]
"""What a loss carries from one update to the next; goes into checkpoints."""


@dataclass(frozen=True)
class Task(ABC):
    """One method with one dataset, whose items are known by their number. The fit loop knows nothing else of either."""

    recipe: OfflineRecipe
    items: Sequence[Any]
    """What is trained as a whole: a packed row, a pair. In file order."""
    reference: Tensor | None = None
    """float32 [·]: log-probs under the reference, in an order of the task's own; NaN for items that are in no update."""

    @classmethod
    @abstractmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        """The recipe's data, or that of a file of the same form.

        Raises:
            UserError: it is bad; names file and row.
        """

    @property
    @abstractmethod
    def samples(self) -> Iterable[Sample]:
        """Every sample of the items."""

    def load_model(self) -> PreTrainedModel:
        """The model to train, freshly loaded."""
        return load_language_model(self.recipe.model, self.recipe.lora)

    @abstractmethod
    def denominator(self, numbers: Sequence[int]) -> int:
        """What the summed loss of these items is divided by: loss tokens, pairs, completions."""

    def sample_weights(self, numbers: Sequence[int], samples: int) -> Tensor:
        """float32 [samples]: the part that each sample of these items' forward pass, in its order, has in their denominator."""
        of_items, sides = torch.tensor([float(self.denominator([number])) for number in numbers]), samples // len(numbers)
        assert samples == sides * len(numbers), f"{samples} samples of {len(numbers)} items"
        return (of_items / sides).repeat(sides)

    @abstractmethod
    def tokens(self, number: int) -> int:
        """Tokens of an item in the forward pass, padding not counted."""

    @abstractmethod
    def outputs(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """The forward pass: all that reads weights. Runs inside DeepSpeed's forward."""

    @abstractmethod
    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Any) -> tuple[Tensor, Metrics]:
        """The loss summed over the items, and what to log. Pure."""

    def broken(self, updates: Sequence[Sequence[int]]) -> str | None:
        """Why the loss of one of these updates cannot be computed."""
        return None

    def model_files(self) -> dict[str, str]:
        """Further files of the trained model's folder: name → text."""
        return {}

    # ── for losses that compare with a reference ─────────────────────────────────────────────────

    @property
    def reference_model(self) -> sections.Model | None:
        """Whose log-probs of `referenced` are needed before training; None: no one's."""
        return None

    def referenced(self, updates: Sequence[Sequence[int]]) -> Sequence[Sample]:
        """The samples whose reference log-probs a run over these updates needs."""
        return ()

    def informed(self, reference: Tensor, updates: Sequence[Sequence[int]]) -> Self:
        """The task that knows them: float32 [M], in the order of `referenced`, of the same updates."""
        raise AssertionError("this task asks no reference")

    # ── for losses that need something of the whole update ───────────────────────────────────────

    def surveyed(self, numbers: Sequence[int]) -> Sequence[Sample]:
        """Samples whose log-probs under the policy, without gradient, the update of these items needs first."""
        return ()

    def context(self, numbers: Sequence[int], logprobs: Tensor, state: State) -> tuple[Any, State]:
        """What `loss` is to know of the whole update, and the state after it.

        Args:
            logprobs: float32 [M]: of the samples that `surveyed` names.
        """
        return None, state


def items_of(updates: Sequence[Sequence[int]]) -> list[int]:
    """The items that are in some update, each once."""
    return sorted({number for numbers in updates for number in numbers})


def placed(values: Tensor, places: Sequence[int], size: int) -> Tensor:
    """float32 [size]: values [M] at their places, NaN elsewhere."""
    out = torch.full((size,), torch.nan)
    out[torch.as_tensor(places)] = values
    return out


def reference_rows(reference: Tensor | None, places: Sequence[int], like: Tensor) -> Tensor:
    """Reference log-probs at some places, on the device of `like`."""
    assert reference is not None, "the reference has not been asked"
    return reference[torch.as_tensor(places)].to(like.device)
