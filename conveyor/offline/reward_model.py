"""Reward models: a scalar score of a whole sample from preference pairs (Bradley and Terry 1952; InstructGPT, arXiv 2203.02155,
equation 1), or of every step of one (Lightman et al. 2023, arXiv 2305.20050)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.algorithms.reward_losses import bradley_terry, step_losses
from conveyor.config import OfflineRecipe
from conveyor.config.offline import RewardModelRecipe
from conveyor.data.packing import lay_out
from conveyor.data.pairs import Pair, load_pairs
from conveyor.data.samples import Sample
from conveyor.data.steps import StepSample, load_steps
from conveyor.models.attention import packs
from conveyor.models.process_scores import step_scores
from conveyor.models.scalar_model import load_scalar_model, sequence_scores
from conveyor.offline.task import Task


class ScalarTask(Task):
    """Trains a sequence classifier with one label."""

    def load_model(self) -> PreTrainedModel:
        """A classifier goes on with its own head, any other model gets a new one."""
        architectures = AutoConfig.from_pretrained(self.recipe.model.path).architectures or []
        new_head = not any("SequenceClassification" in name for name in architectures)
        return load_scalar_model(self.recipe.model, new_head=new_head, lora=self.recipe.lora)


@dataclass(frozen=True)
class RewardModelTask(ScalarTask):
    """Items are pairs; both sides go through one forward."""

    items: Sequence[Pair]

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        return cls(recipe, load_pairs(recipe.data, tokenizer, path=path, margins=True))

    @property
    def samples(self) -> Iterable[Sample]:
        return (sample for pair in self.items for sample in (pair.chosen, pair.rejected))

    def denominator(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    def tokens(self, number: int) -> int:
        return self.items[number].tokens

    def outputs(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """float32 [2B]: scores of the chosen samples, then of the rejected ones, each at its last token."""
        pairs = [self.items[number] for number in numbers]
        samples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        tokens = lay_out([sample.ids for sample in samples], packs(model))
        return sequence_scores(model, tokens.to(next(model.parameters()).device))

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Any) -> tuple[Tensor, Metrics]:
        assert isinstance(self.recipe, RewardModelRecipe)
        settings, n = self.recipe.reward_model, len(numbers)
        chosen, rejected = outputs[:n], outputs[n:]
        given = torch.tensor([self.items[number].margin or 0.0 for number in numbers], device=outputs.device)
        losses = bradley_terry(
            chosen, rejected, margins=given, label_smoothing=settings.label_smoothing, centre_coef=settings.centre_coef
        )  # fmt: skip
        margins = (chosen - rejected).detach()
        return losses.sum(), {
            "loss": Mean(float(losses.detach().sum()), n),
            "accuracy": Mean(float((margins > 0).sum()), n),
            "margin": Mean(float(margins.sum()), n),
            "reward/mean": Mean(float(outputs.detach().sum()), 2 * n),
        }


@dataclass(frozen=True)
class ProcessRewardModelTask(ScalarTask):
    """Items are solutions with a label a step; every step's end has a score, whose σ is the probability that the step is right."""

    items: Sequence[StepSample]

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        return cls(recipe, load_steps(recipe.data, tokenizer, path=path))

    @property
    def samples(self) -> Iterable[Sample]:
        return (item.sample for item in self.items)

    def denominator(self, numbers: Sequence[int]) -> int:
        return sum(len(self.items[number].ends) for number in numbers)

    def tokens(self, number: int) -> int:
        return len(self.items[number].sample.ids)

    def outputs(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """float32 [K]: the score at every step's end, item by item."""
        items = [self.items[number] for number in numbers]
        tokens = lay_out([item.sample.ids for item in items], packs(model))
        return step_scores(model, tokens, [item.ends.tolist() for item in items])

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Any) -> tuple[Tensor, Metrics]:
        labels = torch.from_numpy(np.concatenate([self.items[number].labels for number in numbers])).to(outputs.device)
        losses = step_losses(outputs, labels)
        right = ((outputs > 0) == (labels > 0.5)).sum()
        n = len(labels)
        return losses.sum(), {"loss": Mean(float(losses.detach().sum()), n), "accuracy": Mean(float(right), n)}
