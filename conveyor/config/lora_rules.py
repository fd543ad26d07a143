"""Rules of adapters, which every method may have."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.config.common import Common
from conveyor.config.recipe import OnlineRecipe

LARGEST_SERVED_RANK = 512
"""Of an adapter that vLLM serves."""


def broken_lora_rules(recipe: Common) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule that is broken."""
    lora = recipe.lora
    if lora is None:
        return
    if lora.quantization is not None and recipe.train.zero_stage == 3:
        yield (
            "lora.quantization",
            "4-bit weights are held whole by every rank, which cuts them into a quarter or an eighth; use train.zero_stage 0, 1 or 2",
        )
    if lora.use_dora and recipe.train.zero_stage == 3:
        yield "lora.use_dora", "lengths of weights come from whole ones, and ZeRO-3 cuts them up; use train.zero_stage 0, 1 or 2"
    if lora.quantization is not None and isinstance(recipe, OnlineRecipe) and recipe.score.zero_stage == 3:
        yield "lora.quantization", "score workers hold 4-bit weights whole; use score.zero_stage 0"
    if not isinstance(recipe, OnlineRecipe):
        if lora.sync is not None:
            yield "lora.sync", "no engines follow this training: its adapter is merged at the end"
        return
    if lora.sync == "adapter" and not recipe.adapter_travels:
        yield "lora.sync", "the engine of transformers takes whole weights; use merged"
    if lora.travels and lora.use_dora:
        yield "lora.sync", "vLLM serves no DoRA adapters; use merged"
    if recipe.adapter_travels and recipe.pipeline.weight_transfer not in (None, "object_store"):
        yield "pipeline.weight_transfer", "an adapter is small, and goes through the object store; leave it out, or use lora.sync merged"
    if recipe.adapter_travels and recipe.rollout.sleep == 2:
        yield "rollout.sleep", "2 drops the base for good, and only the adapter travels; use 1, or lora.sync merged"
    if recipe.adapter_travels and recipe.algorithm.reference_refresh and recipe.reference is not None:
        yield (
            "algorithm.reference_refresh",
            "the adapter that travels fits the base model, not a reference of its own; use lora.sync merged",
        )
    if recipe.adapter_travels and lora.rank > LARGEST_SERVED_RANK:
        yield "lora.rank", f"vLLM serves adapters up to rank {LARGEST_SERVED_RANK}; larger ones with lora.sync merged"
