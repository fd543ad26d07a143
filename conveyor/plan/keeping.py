"""How a recipe keeps its models in memory: the settings that memory and costs follow from, whatever the method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from conveyor.config import OfflineRecipe, OnlineRecipe, sections
from conveyor.plan.models import ModelShape

BYTES = {"bfloat16": 2, "float32": 4}
NF4_BITS = 4.127
"""A weight in 4-bit NormalFloat with doubly quantised scales (Dettmers et al. 2023, §3): 4 bits, an 8-bit scale for 64 weights and a
32-bit one for 256 of those: 4 + 8/64 + 32/(64·256)."""
Place = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank adapters beside a model that stays as it is."""

    rank: int
    targets: tuple[str, ...] = ()
    nf4: bool = False


@dataclass(frozen=True, slots=True)
class Keeping:
    """Of models that are trained, and of the frozen ones beside them."""

    size: int
    """Bytes of a weight in forward and backward."""
    stage: int
    """ZeRO."""
    optimizer_place: Place = "none"
    """Where the optimizer's state lies; none: on the GPU."""
    weights_place: Place = "none"
    """Where the weights lie between their uses."""
    checkpointing: bool = False
    adapter: Adapter | None = None
    score_stage: int = 0
    """ZeRO of models that only score."""
    score_place: Place = "none"
    """Where their parts lie between their uses."""
    sequence_ranks: int = 1
    row_limit: int | None = None
    """Most tokens of one forward and backward on one GPU."""

    def trained(self, shape: ModelShape) -> int:
        """Parameters that the optimizer changes; with adapters a scalar head is trained as a whole."""
        if self.adapter is None:
            return shape.parameters
        return shape.adapter_parameters(self.adapter.rank, self.adapter.targets) + shape.hidden * shape.scalar

    def weight_bytes(self, shape: ModelShape) -> float:
        """Of a whole model, as trainers and score workers load it."""
        if self.adapter is None:
            return float(shape.parameters * self.size)
        quantised = shape.linear_parameters if self.adapter.nf4 else 0
        return quantised * NF4_BITS / 8 + (shape.parameters - quantised + self.trained(shape)) * self.size

    def rank_tokens(self, micro_batch: int, longest: int, ranks: int) -> int:
        """Most tokens that one rank computes at a time."""
        own = math.ceil(micro_batch / max(1, ranks // self.sequence_ranks)) * math.ceil(longest / self.sequence_ranks)
        return own if self.row_limit is None else min(own, self.row_limit)


def keeping(recipe: OnlineRecipe | OfflineRecipe) -> Keeping:
    train, model = recipe.train, recipe.model
    lora = recipe.lora
    score = recipe.score if isinstance(recipe, OnlineRecipe) else sections.Score()
    return Keeping(
        size=BYTES[model.dtype],
        stage=train.stage(model.dtype),
        optimizer_place=train.offload_optimizer,
        weights_place=train.offload_parameters,
        checkpointing=model.gradient_checkpointing,
        adapter=None if lora is None else Adapter(lora.rank, lora.target_modules, lora.quantization == "nf4"),
        score_stage=score.zero_stage,
        score_place=score.offload_parameters,
        sequence_ranks=train.sequence_parallel_size,
        row_limit=train.max_tokens_per_micro_batch,
    )
