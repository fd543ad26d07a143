"""Reward model: a scalar score of a whole sample, from preference pairs.

Bradley-Terry (Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, equation 1): P(chosen ≻ rejected) = σ(r_chosen − r_rejected).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.config import OfflineRecipe
from conveyor.data.pairs import Pair, load_pairs
from conveyor.data.samples import Sample
from conveyor.models.joining import pad_right
from conveyor.models.scalar_model import load_scalar_model, sequence_scores


@dataclass(frozen=True)
class RewardModelTask:
    """Items are pairs; both sides go through one forward."""

    recipe: OfflineRecipe
    items: Sequence[Pair]
    eval_items: Sequence[Pair]

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase) -> RewardModelTask:
        """The data of a recipe; raises UserError where it is bad (see `load_pairs`)."""
        held_out = load_pairs(recipe.data, tokenizer, path=recipe.data.eval_path) if recipe.data.eval_path else []
        return cls(recipe, load_pairs(recipe.data, tokenizer), held_out)

    @property
    def samples(self) -> list[Sample]:
        return [sample for pair in (*self.items, *self.eval_items) for sample in (pair.chosen, pair.rejected)]

    def load_model(self) -> PreTrainedModel:
        """A classifier goes on with its own head, any other model gets a new one."""
        architectures = AutoConfig.from_pretrained(self.recipe.model.path).architectures or []
        return load_scalar_model(self.recipe.model, new_head=not any("SequenceClassification" in name for name in architectures))

    def denominator(self, item: Pair) -> int:
        return 1

    def tokens(self, item: Pair) -> int:
        return item.tokens

    def outputs(self, model: PreTrainedModel, items: Sequence[Pair]) -> Tensor:
        """float32 [2B]: scores of the chosen samples, then of the rejected ones."""
        samples = [pair.chosen for pair in items] + [pair.rejected for pair in items]
        input_ids, attention_mask = pad_right([torch.from_numpy(sample.ids).long() for sample in samples])
        where = next(model.parameters()).device
        return sequence_scores(model, input_ids.to(where), attention_mask.to(where))

    def loss(self, outputs: Tensor, items: Sequence[Pair]) -> tuple[Tensor, Metrics]:
        margins = outputs[: len(items)] - outputs[len(items) :]
        total, n = bradley_terry(margins), len(items)
        margins = margins.detach()
        return total, {
            "loss": Mean(total.item(), n),
            "accuracy": Mean(float((margins > 0).sum()), n),
            "margin": Mean(float(margins.sum()), n),
        }


def bradley_terry(margins: Tensor) -> Tensor:
    """Σ −log σ(r_chosen − r_rejected) over the pairs: margins [B] → scalar."""
    return -F.logsigmoid(margins.float()).sum()
