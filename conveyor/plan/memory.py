"""Whether the roles of a recipe fit the memory of the GPUs they are placed on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from conveyor.config import OnlineRecipe
from conveyor.plan.hardware import GPU, RESERVED_BYTES
from conveyor.plan.lengths import LengthFacts
from conveyor.plan.models import ModelShape

BYTES = {"bfloat16": 2, "float32": 4}
ACTIVATION_BYTES = 34
"""Stored by one layer for its backward pass, a token and a unit of hidden size, in 16 bits and with attention that stores no matrix of
scores (Korthikanti et al. 2022, eq. 2 without its 5as/h)."""
FORWARD_BYTES = 24
"""Held at a time by a forward pass without gradients, a token and a unit of hidden size: some tensors of one layer."""
LOGITS_BYTES = 1e9
"""One chunk of logits in fp32, with its gradient where there is one."""


CACHE_MARGIN = 1.1
"""KV cache for so many times the mean: the running samples are sometimes longer, and an engine without room drops some and samples
them anew."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The models of a recipe."""

    policy: ModelShape
    scalar: ModelShape
    """Of the critic and of reward models."""

    def of(self, role: str) -> ModelShape:
        return self.policy if role in ("rollout", "actor", "reference", "policy_snapshot") else self.scalar


@dataclass(frozen=True)
class GroupMemory:
    """Bytes on each GPU of a device group, by what they are for."""

    group: str
    items: dict[str, float]
    limit: float

    @property
    def total(self) -> float:
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def group_memory(recipe: OnlineRecipe, shapes: Shapes, gpu: GPU, lengths: LengthFacts) -> list[GroupMemory]:
    """Memory of each device group of a recipe with `devices`. Roles merged on a group lie there side by side.

    An engine on a group of its own may fill `rollout.gpu_memory_utilization` of a GPU, which is then the limit.
    """
    assert recipe.devices is not None
    tables = []
    for group, count in recipe.devices.items():
        items = {"reserved": RESERVED_BYTES}
        scored = scored_roles(recipe, group)
        if scored:
            items |= _score_items(recipe, shapes, lengths, scored, score_shards(recipe, shapes, gpu, group))
        trained = tuple(role for role in ("actor", "critic") if role in recipe.placed_roles and recipe.role_group(role) == group)
        if trained:
            items |= _train_items(recipe, shapes, lengths, trained, int(count))
        limit = gpu.memory
        if recipe.role_group("rollout") == group:
            items |= engine_items(recipe, shapes.policy, lengths)
            if not scored and not trained:
                limit *= recipe.rollout.gpu_memory_utilization
        tables.append(GroupMemory(group, items, limit))
    return tables


def engine_items(recipe: OnlineRecipe, shape: ModelShape, lengths: LengthFacts) -> dict[str, float]:
    """Of an engine, on each of its GPUs: the cache is split by key/value heads, as far as there are any."""
    width, size = recipe.rollout.tensor_parallel_size, engine_bytes(recipe)
    token = shape.cache_bytes(size) / min(width, shape.kv_heads)
    return {
        "engine weights": shape.parameters * size / width,
        "KV cache": recipe.rollout.max_concurrent_requests * lengths.resident * token * CACHE_MARGIN,
        "engine activations": LOGITS_BYTES,
    }


def engine_bytes(recipe: OnlineRecipe) -> int:
    return BYTES[recipe.rollout.dtype or recipe.model.dtype]


def scored_roles(recipe: OnlineRecipe, group: str) -> tuple[str, ...]:
    """Roles of the score stage on a group."""
    return tuple(role for role in (*recipe.score_roles, *recipe.snapshot_roles) if recipe.role_group(role) == group)


def score_shards(recipe: OnlineRecipe, shapes: Shapes, gpu: GPU, group: str) -> int:
    """GPUs over which one score worker spreads its weights: 1, or as few, a power of two, as let them fit; all of the group's
    if even they do not."""
    assert recipe.devices is not None
    count, free = int(recipe.devices[group]), gpu.memory - RESERVED_BYTES - LOGITS_BYTES
    weights = sum(shapes.of(role).parameters for role in scored_roles(recipe, group)) * BYTES[recipe.model.dtype]
    shards = 1
    while weights / shards > 0.9 * free and shards * 2 <= count and count % (shards * 2) == 0:
        shards *= 2
    return shards


def _score_items(recipe: OnlineRecipe, shapes: Shapes, lengths: LengthFacts, roles: tuple[str, ...], shards: int) -> dict[str, float]:
    size = BYTES[recipe.model.dtype]
    tokens = recipe.pipeline.micro_batch_size * lengths.longest
    widest = max(shapes.of(role).hidden for role in roles)
    weights = {f"{role} weights": shapes.of(role).parameters * size / shards for role in roles}
    return weights | {"score activations": tokens * widest * FORWARD_BYTES * size / 2 / shards + LOGITS_BYTES}


def _train_items(recipe: OnlineRecipe, shapes: Shapes, lengths: LengthFacts, roles: tuple[str, ...], ranks: int) -> dict[str, float]:
    """Mixed precision (Rajbhandari et al. 2020, §3.1): 2 bytes a parameter for weights, 4 for accumulated gradients, 12 for the
    fp32 copy and Adam's two moments. In fp32 the weights are their own copy: 4 + 4 + 8."""
    parameters = sum(shapes.of(role).parameters for role in roles)
    stage, size = recipe.train.stage(recipe.model.dtype), BYTES[recipe.model.dtype]
    states = 12 if size == 2 else 8
    items = {
        "trained weights": 0.0 if recipe.train.offload_parameters != "none" else parameters * size / (ranks if stage == 3 else 1),
        "gradients": parameters * 4 / (ranks if stage >= 2 else 1),
    }
    if recipe.train.offload_optimizer == "none":
        items["optimizer"] = parameters * states / (ranks if stage >= 1 else 1)
    if (apart := sum(apart_gradients(recipe, role) * shapes.of(role).parameters for role in roles)) > 0:
        items["gradients kept apart"] = apart * 4
    if stage == 3 and ranks > 1:
        items["gathered layers"] = max(2 * shapes.of(r).layer_parameters + shapes.of(r).vocab * shapes.of(r).hidden for r in roles) * size
    return items | {"train activations": max(_activations(recipe, shapes.of(role), lengths, ranks) for role in roles) + LOGITS_BYTES}


def apart_gradients(recipe: OnlineRecipe, role: str) -> int:
    """Full gradients in fp32 that `normalize: streaming_exact` keeps apart from the trainer's own: of the advantages, of ones, and of
    the losses that are not the policy's."""
    algorithm = recipe.algorithm
    if role != "actor" or algorithm.normalize != "streaming_exact":
        return 0
    return 2 + (algorithm.entropy_coef > 0 or (algorithm.kl_in == "loss" and recipe.uses_reference))


def _activations(recipe: OnlineRecipe, shape: ModelShape, lengths: LengthFacts, ranks: int) -> float:
    """Of a rank's share of a micro-batch. Recomputation keeps each layer's input (2 bytes) and one layer's whole set
    (Korthikanti et al. 2022, §5)."""
    tokens = math.ceil(recipe.pipeline.micro_batch_size / ranks) * lengths.longest
    a_layer = ACTIVATION_BYTES * shape.hidden * tokens
    stored = 2 * shape.hidden * tokens * shape.layers + a_layer if recipe.model.gradient_checkpointing else a_layer * shape.layers
    return stored * BYTES[recipe.model.dtype] / 2
