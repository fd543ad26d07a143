"""The supervised rows that are mixed into the updates of a run (PPO-ptx)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from conveyor.config import OnlineRecipe
from conveyor.data.order import EpochOrder
from conveyor.data.samples import Sample
from conveyor.data.sft import load_sft


@dataclass(frozen=True)
class Mixture:
    """Rows of every update, a pure function of its number: a resumed run needs no state of it."""

    samples: Sequence[Sample]
    batch_size: int
    order: EpochOrder

    @classmethod
    def read(cls, recipe: OnlineRecipe, tokenizer: PreTrainedTokenizerBase) -> Mixture:
        """The rows of the recipe's `ptx`; raises UserError where they are bad (see `load_sft`)."""
        assert recipe.ptx is not None
        data = recipe.data.model_copy(update={"split": recipe.ptx.split})
        samples = load_sft(data, tokenizer, path=recipe.ptx.path, key="ptx.path")
        order = EpochOrder(len(samples), 1, steps=sys.maxsize, shuffle=recipe.data.shuffle, seed=recipe.seed)
        return cls(samples, recipe.ptx.batch_size, order)

    def rows(self, update: int) -> list[Sample]:
        """Those of the `update`-th update of the run. A set that is used up starts again, shuffled anew."""
        first = update * self.batch_size
        return [self.samples[item] for place in range(first, first + self.batch_size) for item in self.order.items(place)]
