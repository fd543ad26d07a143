"""Supervised fine-tuning: the mean of −log p over the learnt tokens of an update.

`conditional_sft` is the same on prompts that say how good their answer is: by a score (Dong et al. 2023, SteerLM; Hu et al. 2023,
arXiv 2308.12050), or by the class of their source, weighted: −Σ w_c log π(y | x, c) (Wang et al. 2023, OpenChat's C-RLFT, eq. 5).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.config import OfflineRecipe
from conveyor.config.offline import ConditionalSftRecipe
from conveyor.data.conditional import Weighted, load_conditional
from conveyor.data.packing import first_fit_decreasing
from conveyor.data.samples import Sample
from conveyor.data.sft import load_sft
from conveyor.models.sample_logprobs import completion_logprobs
from conveyor.offline.task import Task


@dataclass(frozen=True)
class SupervisedTask(Task):
    """Items are rows: of one sample, or of several packed ones."""

    items: Sequence[Sequence[Weighted]]

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        return cls.of(recipe, [Weighted(sample, 1.0) for sample in load_sft(recipe.data, tokenizer, path=path)])

    @classmethod
    def of(cls, recipe: OfflineRecipe, samples: Sequence[Weighted]) -> Self:
        """Rows of these samples, packed where the recipe says so."""
        if not recipe.data.packing:
            return cls(recipe, [(sample,) for sample in samples])
        bins = first_fit_decreasing([len(weighted.sample.ids) for weighted in samples], recipe.data.max_length)
        return cls(recipe, [tuple(samples[item] for item in items) for items in bins])

    @property
    def samples(self) -> Iterable[Sample]:
        return (weighted.sample for row in self.items for weighted in row)

    def denominator(self, numbers: Sequence[int]) -> int:
        return sum(weighted.sample.loss_tokens for number in numbers for weighted in self.items[number])

    def sample_weights(self, numbers: Sequence[int], samples: int) -> Tensor:
        return torch.tensor([float(weighted.sample.loss_tokens) for number in numbers for weighted in self.items[number]])

    def tokens(self, number: int) -> int:
        return sum(len(weighted.sample.ids) for weighted in self.items[number])

    def outputs(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """float32 [N]: w·log p of the learnt tokens, row by row."""
        flat = [weighted for number in numbers for weighted in self.items[number]]
        logprobs, owners = completion_logprobs(model, [weighted.sample for weighted in flat])
        return logprobs * torch.tensor([weighted.weight for weighted in flat], device=owners.device)[owners]

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: Any) -> tuple[Tensor, Metrics]:
        total = -outputs.sum()
        return total, {"loss": Mean(total.item(), outputs.numel())}


@dataclass(frozen=True)
class ConditionalTask(SupervisedTask):
    """The same, of prompts with a condition."""

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        assert isinstance(recipe, ConditionalSftRecipe)
        samples, fitted = load_conditional(recipe.data, recipe.condition, tokenizer, path=path)
        if fitted is not None:  # held-out data is read by the recipe of the task, and so with the same normalisation
            condition = recipe.condition.model_copy(update={"mean": fitted.mean, "std": fitted.std})
            recipe = recipe.model_copy(update={"condition": condition})
        return cls.of(recipe, samples)

    def model_files(self) -> dict[str, str]:
        """condition.json: what `conveyor generate` and `conveyor evaluate` put prompts into, and the condition it stands for."""
        assert isinstance(self.recipe, ConditionalSftRecipe)
        condition = self.recipe.condition
        told = {
            "prompt_template": condition.template.replace("{condition}", condition.target_text),
            "condition": condition.model_dump(mode="json"),
        }
        return {"condition.json": json.dumps(told, indent=2, ensure_ascii=False) + "\n"}
