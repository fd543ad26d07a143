"""Preference optimisation from pairs, without a reward model: DPO and its kin, by `dpo.loss` (`algorithms/pair_losses.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conveyor.algorithms.metrics import Mean, Metrics
from conveyor.algorithms.pair_losses import QUANTILES, PairLogprobs, aot_matched, pair_losses, pair_metrics
from conveyor.config import OfflineRecipe, sections
from conveyor.config.offline import Dpo, DpoRecipe
from conveyor.data.pairs import Pair, load_pairs
from conveyor.data.samples import Sample
from conveyor.models.sample_logprobs import loss_tokens, sample_logprobs
from conveyor.offline.task import State, Task, items_of, placed, reference_rows


@dataclass(frozen=True)
class _Update:
    """What the loss of a micro-batch knows of its update."""

    chosen_tokens_per_pair: float
    """Chosen completions' tokens of the whole update, by its number of pairs."""
    matched: dict[int, Tensor]
    """Item → its row of `aot_matched`; empty for losses that do not compare quantiles."""


@dataclass(frozen=True)
class DpoTask(Task):
    """Items are pairs; both sides go through one forward."""

    items: Sequence[Pair]

    @classmethod
    def read(cls, recipe: OfflineRecipe, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> Self:
        return cls(recipe, load_pairs(recipe.data, tokenizer, path=path))

    @property
    def settings(self) -> Dpo:
        assert isinstance(self.recipe, DpoRecipe)
        return self.recipe.dpo

    @property
    def samples(self) -> Iterable[Sample]:
        return self._sides(range(len(self.items)))

    def _sides(self, numbers: Sequence[int]) -> list[Sample]:
        """The chosen samples, then the rejected ones."""
        pairs = [self.items[number] for number in numbers]
        return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]

    def denominator(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    def tokens(self, number: int) -> int:
        return self.items[number].tokens

    def outputs(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """float32 [2B]: log π of the chosen completions, then of the rejected ones."""
        return sample_logprobs(model, self._sides(numbers))

    @property
    def reference_model(self) -> sections.Model | None:
        assert isinstance(self.recipe, DpoRecipe)
        return (self.recipe.reference or self.recipe.model) if self.settings.needs_reference else None

    def referenced(self, updates: Sequence[Sequence[int]]) -> Sequence[Sample]:
        return self._sides(items_of(updates))

    def informed(self, reference: Tensor, updates: Sequence[Sequence[int]]) -> Self:
        """Kept are chosen sides [N], then rejected ones [N]."""
        asked, total = items_of(updates), len(self.items)
        places = [*asked, *(total + number for number in asked)]
        return replace(self, reference=placed(reference, places, 2 * total))

    def surveyed(self, numbers: Sequence[int]) -> Sequence[Sample]:
        return self._sides(numbers) if self.settings.loss in QUANTILES else ()

    def context(self, numbers: Sequence[int], logprobs: Tensor, state: State) -> tuple[_Update, State]:
        matched: dict[int, Tensor] = {}
        if self.settings.loss in QUANTILES:
            whole = aot_matched(self.settings.loss, self._logprobs(logprobs, numbers), self.settings.normalizes)  # type: ignore[arg-type]
            matched = dict(zip(numbers, whole, strict=True))
        tokens = sum(self.items[number].chosen.loss_tokens for number in numbers)
        return _Update(tokens / len(numbers), matched), state

    def _logprobs(self, outputs: Tensor, numbers: Sequence[int]) -> PairLogprobs:
        """Log-probs [2B] of the policy, chosen then rejected, with what they are compared with."""
        n, total = len(numbers), len(self.items)
        references: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.settings.needs_reference:
            rejected = [total + number for number in numbers]
            references = (reference_rows(self.reference, numbers, outputs), reference_rows(self.reference, rejected, outputs))
        tokens = loss_tokens(self._sides(numbers)).to(outputs.device)
        return PairLogprobs(outputs[:n], outputs[n:], *references, tokens[:n], tokens[n:])

    def loss(self, outputs: Tensor, numbers: Sequence[int], context: _Update) -> tuple[Tensor, Metrics]:
        """Pair losses, and `nll_coef` times the mean −log p over the chosen completions' tokens of the update."""
        settings, pairs = self.settings, self._logprobs(outputs, numbers)
        matched = torch.stack([context.matched[number] for number in numbers]) if context.matched else None
        losses = pair_losses(
            settings.loss, pairs, beta=settings.beta_used, label_smoothing=settings.smoothing_used, margin=settings.margin_used,
            length_normalize=settings.normalizes, discopop_tau=settings.discopop_tau, matched=matched,
        )  # fmt: skip
        total, nll = losses.sum(), -pairs.chosen.sum()
        if settings.nll_used:
            total = total + settings.nll_used / context.chosen_tokens_per_pair * nll
        return total, {
            "loss": Mean(total.item(), len(numbers)),
            "loss/pairs": Mean(float(losses.detach().sum()), len(numbers)),
            "loss/nll": Mean(nll.item(), float(pairs.chosen_tokens.sum())),
            "logprobs/chosen": Mean(float(pairs.chosen.detach().sum()), len(numbers)),
            "logprobs/rejected": Mean(float(pairs.rejected.detach().sum()), len(numbers)),
            **pair_metrics(settings.loss, pairs, beta=settings.beta_used, length_normalize=settings.normalizes),
        }
