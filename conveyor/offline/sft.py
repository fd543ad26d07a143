"""Supervised fine-tuning: the mean of −log p over the learnt tokens of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.config import OfflineRecipe
from conveyor.data.packing import Row, collate, pack
from conveyor.data.samples import Sample
from conveyor.data.sft import load_sft
from conveyor.models.language_model import load_language_model, target_logprobs


@dataclass(frozen=True)
class SupervisedTask:
    """Items are rows of one sample, or of several packed ones."""

    recipe: OfflineRecipe
    items: Sequence[Row]
    eval_items: Sequence[Row]
    pad_token_id: int

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase) -> SupervisedTask:
        """The data of a recipe; raises UserError where it is bad (see `load_sft`)."""
        data = recipe.data

        def rows(samples: Sequence[Sample]) -> list[Row]:
            return pack(samples, data.max_length) if data.packing else [(sample,) for sample in samples]

        held_out = load_sft(data, tokenizer, path=data.eval_path) if data.eval_path else []
        return cls(recipe, rows(load_sft(data, tokenizer)), rows(held_out), int(tokenizer.pad_token_id))

    @property
    def samples(self) -> list[Sample]:
        return [sample for row in (*self.items, *self.eval_items) for sample in row]

    def load_model(self) -> PreTrainedModel:
        return load_language_model(self.recipe.model)

    def denominator(self, item: Row) -> int:
        return sum(sample.loss_tokens for sample in item)

    def tokens(self, item: Row) -> int:
        return sum(len(sample.ids) for sample in item)

    def outputs(self, model: PreTrainedModel, items: Sequence[Row]) -> Tensor:
        """float32 [N]: log-probabilities of the learnt tokens, row by row."""
        where = next(model.parameters()).device
        return target_logprobs(model, collate(items, self.pad_token_id).to(where))

    def loss(self, outputs: Tensor, items: Sequence[Row]) -> tuple[Tensor, Metrics]:
        total = -outputs.sum()
        return total, {"loss": Mean(total.item(), outputs.numel())}
