"""Preference optimisation from single completions marked desirable or not: KTO and BCO (`algorithms/unpaired_losses.py`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.algorithms.unpaired_losses import RewardShift, apo_zero_unpaired_losses, bco_losses, kto_kl, kto_losses, mismatched
from conveyor.config import OfflineRecipe, sections
from conveyor.config.offline import Bco, BcoRecipe, Kto, KtoRecipe, ReferencedRecipe
from conveyor.data.samples import Sample
from conveyor.data.unpaired import Labelled, load_unpaired, mismatch
from conveyor.models.sample_logprobs import sample_logprobs
from conveyor.offline.task import State, Task, items_of, placed, reference_rows


@dataclass(frozen=True)
class UnpairedTask(Task):
    """Items are completions with a label."""

    items: Sequence[Labelled]

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        return cls(recipe, load_unpaired(recipe.data, tokenizer, path=path))

    @property
    def samples(self) -> Iterable[Sample]:
        return (item.sample for item in self.items)

    def denominator(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    def tokens(self, number: int) -> int:
        return len(self.items[number].sample.ids)

    def outputs(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """float32 [B]: log π of each completion."""
        return sample_logprobs(model, [self.items[number].sample for number in numbers])

    @property
    def reference_model(self) -> sections.Model | None:
        assert isinstance(self.recipe, ReferencedRecipe)
        return self.recipe.reference or self.recipe.model

    def referenced(self, updates: Sequence[Sequence[int]]) -> Sequence[Sample]:
        return [self.items[number].sample for number in items_of(updates)]

    def informed(self, reference: Tensor, updates: Sequence[Sequence[int]]) -> Self:
        """Kept are the items' [N], then any further ones."""
        asked, total = items_of(updates), len(self.items)
        further = len(reference) - len(asked)
        return replace(self, reference=placed(reference, [*asked, *range(total, total + further)], total + further))

    def labels(self, numbers: Sequence[int]) -> Tensor:
        """bool [B]: True where desirable."""
        return torch.tensor([self.items[number].label for number in numbers])

    @property
    @abstractmethod
    def beta(self) -> float: ...

    @abstractmethod
    def losses(self, outputs: Tensor, reference: Tensor, labels: Tensor, context: Any) -> Tensor:
        """[B] of log-probs [B] twice and labels bool [B]."""

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Any) -> tuple[Tensor, Metrics]:
        reference = reference_rows(self.reference, numbers, outputs)
        labels = self.labels(numbers).to(outputs.device)
        losses = self.losses(outputs, reference, labels, context)
        rewards = self.beta * (outputs - reference).detach()
        desirable, n = int(labels.sum()), len(numbers)
        return losses.sum(), {
            "loss": Mean(float(losses.detach().sum()), n),
            "rewards/desirable": Mean(float(rewards[labels].sum()), desirable),
            "rewards/undesirable": Mean(float(rewards[~labels].sum()), n - desirable),
            "desirable_fraction": Mean(desirable, n),
        }


@dataclass(frozen=True)
class KtoTask(UnpairedTask):
    """Its KL term pairs each prompt of an update with another row's completion."""

    mismatches: dict[tuple[int, int], int] | None = None
    """(prompt's item, completion's item) → place in `reference`, after the items' own."""

    @property
    def settings(self) -> Kto:
        assert isinstance(self.recipe, KtoRecipe)
        return self.recipe.kto

    @property
    def beta(self) -> float:
        return self.settings.beta

    def _mismatched(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(prompt's item, completion's item) of each row of an update's KL term."""
        if self.settings.loss != "kto":
            return []
        partners = mismatched([self.items[number].prompt for number in numbers])
        return [(number, numbers[partner]) for number, partner in zip(numbers, partners, strict=True)]

    def _joined(self, two: tuple[int, int]) -> Sample:
        """Cut to the length that samples may have."""
        joined, limit = mismatch(self.items[two[0]].sample, self.items[two[1]].sample), self.recipe.data.max_length
        return Sample(joined.ids[:limit], joined.mask[:limit], joined.place)

    def _places(self, updates: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
        pairs = dict.fromkeys(two for numbers in updates for two in self._mismatched(numbers))
        return {two: len(self.items) + place for place, two in enumerate(pairs)}

    def broken(self, updates: Sequence[Sequence[int]]) -> str | None:
        """An update of one row can be paired with no other."""
        if self.settings.loss == "kto" and any(len(numbers) < 2 for numbers in updates):
            return "an update would have one row, and KTO's KL term pairs a prompt with another row's completion"
        return None

    def referenced(self, updates: Sequence[Sequence[int]]) -> Sequence[Sample]:
        return [*super().referenced(updates), *map(self._joined, self._places(updates))]

    def informed(self, reference: Tensor, updates: Sequence[Sequence[int]]) -> Self:
        return replace(super().informed(reference, updates), mismatches=self._places(updates))

    def surveyed(self, numbers: Sequence[int]) -> Sequence[Sample]:
        return [self._joined(two) for two in self._mismatched(numbers)]

    def context(self, numbers: Sequence[int], logprobs: Tensor, state: State) -> tuple[Tensor, State]:
        """z0, the KL to the reference, of the whole update."""
        pairs = self._mismatched(numbers)
        if not pairs:
            return logprobs.new_zeros(()), state
        assert self.mismatches is not None
        return kto_kl(logprobs, reference_rows(self.reference, [self.mismatches[two] for two in pairs], logprobs)), state

    def losses(self, outputs: Tensor, reference: Tensor, labels: Tensor, context: Tensor) -> Tensor:
        settings = self.settings
        weights = {"desirable_weight": settings.desirable_weight, "undesirable_weight": settings.undesirable_weight}
        if settings.loss == "apo_zero_unpaired":
            return apo_zero_unpaired_losses(outputs, reference, labels, beta=settings.beta, **weights)
        return kto_losses(outputs, reference, labels, kl=context, beta=settings.beta, **weights)

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Tensor) -> tuple[Tensor, Metrics]:
        total, metrics = super().loss(outputs, numbers, context)
        return total, metrics | {"kl": Mean(float(context) * len(numbers), len(numbers))}


@dataclass(frozen=True)
class BcoTask(UnpairedTask):
    """Its shift is the mean reward of all updates so far, this one included."""

    @property
    def settings(self) -> Bco:
        assert isinstance(self.recipe, BcoRecipe)
        return self.recipe.bco

    @property
    def beta(self) -> float:
        return self.settings.beta

    def surveyed(self, numbers: Sequence[int]) -> Sequence[Sample]:
        return [self.items[number].sample for number in numbers]

    def context(self, numbers: Sequence[int], logprobs: Tensor, state: State) -> tuple[float, State]:
        rewards = self.beta * (logprobs - reference_rows(self.reference, numbers, logprobs))
        labels = self.labels(numbers).to(rewards.device)
        shift = RewardShift(**state).updated(rewards[labels], rewards[~labels])
        return shift.delta, shift.state()

    def losses(self, outputs: Tensor, reference: Tensor, labels: Tensor, context: float) -> Tensor:
        settings = self.settings
        return bco_losses(
            outputs, reference, labels, delta=context, beta=settings.beta,
            desirable_weight=settings.desirable_weight, undesirable_weight=settings.undesirable_weight,
        )  # fmt: skip
