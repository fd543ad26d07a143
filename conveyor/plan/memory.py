"""What the roles of a recipe take of the memory of the GPUs they are placed on, and of the machines' own memory.

What is kept for a parameter that is trained was read out of DeepSpeed 0.19 (`zero/stage3.py`, `zero/stage_1_and_2.py`, `bf16_optimizer.py`)
with the settings of `models/train_engine.py`; activations follow from the layers (`ModelShape.layer_activations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conveyor.config import OnlineRecipe
from conveyor.plan.hardware import GPU, RESERVED_BYTES
from conveyor.plan.keeping import BYTES, Keeping, keeping
from conveyor.plan.lengths import LengthFacts
from conveyor.plan.models import ModelShape

FORWARD_BYTES = 24
"""Held at a time by a forward pass without gradients, a token and a unit of hidden size: some tensors of one layer."""
LOGITS_BYTES = 1e9
"""One chunk of logits in fp32 (`models.language_model.CHUNK_LOGITS`), with its gradient where there is one."""
GRAPH_BYTES = 1e9
"""CUDA graphs that an engine captures."""
PROCESS_BYTES = 1e9
"""Context and libraries of a further process on the same GPU."""
LIVE_PARAMETERS = 1_000_000_000
"""That ZeRO-3 fetches ahead and keeps at most: DeepSpeed's `stage3_max_live_parameters`."""
REDUCED_ELEMENTS = 50_000_000
"""`models.train_engine.REDUCE_ELEMENTS`: gradients reduced at a time, unless one tensor is larger."""
CACHE_MARGIN = 1.1
"""KV cache for so many times the mean: the running samples are sometimes longer, and an engine without room drops some and samples
them anew."""

Items = dict[str, float]
"""What it is for → bytes."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The models of a recipe."""

    policy: ModelShape
    scalar: ModelShape
    """Of the critic and of reward models: what they were made from."""
    roles: Mapping[str, ModelShape] = field(default_factory=dict)
    """Of roles with another model."""

    def of(self, role: str) -> ModelShape:
        if role in ("rollout", "actor", "reference", "policy_snapshot"):
            return self.roles.get(role, self.policy)
        return self.roles.get("critic" if role == "critic_snapshot" else role, self.scalar).as_scalar()


@dataclass(frozen=True)
class GroupMemory:
    """Bytes on each GPU of a device group, by what they are for."""

    group: str
    items: Items
    limit: float
    turns: tuple[tuple[str, ...], ...] = ()
    """Items of each stage that takes turns on the group with the others: while one is there, those of the others wait in host memory."""
    host: Items = field(default_factory=dict)
    """Bytes of the machine's own memory, for each GPU."""
    disk: Items = field(default_factory=dict)
    """Bytes on NVMe, for each GPU."""

    @property
    def total(self) -> float:
        """Of what is there at a time."""
        in_turn = {name for turn in self.turns for name in turn}
        always = sum(size for name, size in self.items.items() if name not in in_turn)
        return always + max((sum(self.items[name] for name in turn) for turn in self.turns), default=0.0)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def group_memory(recipe: OnlineRecipe, shapes: Shapes, gpu: GPU, lengths: LengthFacts) -> list[GroupMemory]:
    """Memory of each device group of a recipe with `devices`. Roles merged on a group lie there side by side, unless they sleep while
    it is not their turn (`pipeline.sleep`).

    An engine on a group of its own may fill `rollout.gpu_memory_utilization` of a GPU, which is then the limit.
    """
    assert recipe.devices is not None
    return [_one_group(recipe, shapes, gpu, lengths, group) for group in recipe.devices]


def _one_group(recipe: OnlineRecipe, shapes: Shapes, gpu: GPU, lengths: LengthFacts, group: str) -> GroupMemory:
    assert recipe.devices is not None
    count, kept = recipe.devices[group], keeping(recipe)
    stages: list[Items] = []
    host: Items = {}
    disk: Items = {}
    scored = scored_roles(recipe, group)
    if scored:
        models, scoring = _score_items(recipe, kept, shapes, lengths, scored, score_shards(recipe, group))
        host, disk = (models if kept.score_place == place else {} for place in ("cpu", "nvme"))
        stages.append((models if kept.score_place == "none" else {}) | scoring)
    trained = tuple(role for role in ("actor", "critic") if role in recipe.placed_roles and recipe.role_group(role) == group)
    if trained:
        ranks = max(1, int(count))
        tokens = kept.rank_tokens(recipe.pipeline.micro_batch_size, lengths.longest, ranks)
        apart = sum(apart_gradients(recipe, role) * kept.trained(shapes.of(role)) for role in trained)
        items, more_host, more_disk = train_items(kept, [shapes.of(role) for role in trained], ranks, tokens, apart)
        stages.append(items)
        host, disk = host | more_host, disk | more_disk
    limit = gpu.memory * min(1.0, count)
    if recipe.role_group("rollout") == group:
        stages.append(engine_items(recipe, shapes.of("rollout"), lengths))
        if not scored and not trained:
            limit *= recipe.rollout.gpu_memory_utilization
    items = {"reserved": RESERVED_BYTES + PROCESS_BYTES * (len(stages) - 1)}
    for stage in stages:
        items |= stage
    turns: tuple[tuple[str, ...], ...] = ()
    if len(stages) > 1 and group in recipe.sleeping_groups(gpus=True):
        turns = tuple(tuple(stage) for stage in stages)
        waiting = [sum(stage.values()) - stage.get("KV cache", 0.0) for stage in stages]
        host = host | {"what waits for its turn": sum(waiting) - min(waiting)}
    return GroupMemory(group, items, limit, turns, host, disk)


# ── rollout ──────────────────────────────────────────────────────────────────────────────────────


def engine_items(recipe: OnlineRecipe, shape: ModelShape, lengths: LengthFacts) -> Items:
    """Of an engine, on each of its GPUs: the cache is split by key/value heads, as far as there are any. A base in 4 bits is
    dequantised for the engine."""
    width, size, adapter = recipe.rollout.tensor_parallel_size, engine_bytes(recipe), keeping(recipe).adapter
    token = shape.cache_bytes(size) / min(width, shape.kv_heads)
    factors = 0 if adapter is None else shape.adapter_parameters(adapter.rank, adapter.targets)
    return {
        "engine weights": (shape.parameters + factors) * size / width,
        "KV cache": recipe.rollout.max_concurrent_requests * lengths.resident * token * CACHE_MARGIN,
        "engine activations": LOGITS_BYTES + (0.0 if recipe.rollout.enforce_eager else GRAPH_BYTES),
    }


def engine_bytes(recipe: OnlineRecipe) -> int:
    return BYTES[recipe.rollout.dtype or recipe.model.dtype]


# ── score ────────────────────────────────────────────────────────────────────────────────────────


def scored_roles(recipe: OnlineRecipe, group: str) -> tuple[str, ...]:
    """Roles of the score stage on a group."""
    return tuple(role for role in (*recipe.score_roles, *recipe.snapshot_roles) if recipe.role_group(role) == group)


def scored_weights(recipe: OnlineRecipe, group: str) -> tuple[str, ...]:
    """Names of their weights in a group's items."""
    return tuple(f"{role} weights" for role in scored_roles(recipe, group))


def score_shards(recipe: OnlineRecipe, group: str) -> int:
    """GPUs over which the models of the score stage are spread: all of the group's with `score.zero_stage: 3`, else each has them whole."""
    assert recipe.devices is not None
    return max(1, int(recipe.devices[group])) if keeping(recipe).score_stage == 3 else 1


def _score_items(
    recipe: OnlineRecipe, kept: Keeping, shapes: Shapes, lengths: LengthFacts, roles: tuple[str, ...], shards: int
) -> tuple[Items, Items]:
    """(weights, what else is on each GPU)"""
    tokens = kept.rank_tokens(recipe.pipeline.micro_batch_size, lengths.longest, shards)
    own = [role for role in roles if not _is_adapter_off(recipe, kept, roles, role)]
    weights = {f"{role} weights": kept.weight_bytes(shapes.of(role)) / shards for role in own}
    widest = max(shapes.of(role).hidden for role in roles)
    gathered = _gathered(kept, [shapes.of(role) for role in roles], "score layers", when=kept.score_stage == 3)
    return weights, gathered | {"score activations": tokens * widest * FORWARD_BYTES * kept.size / 2 + LOGITS_BYTES}


def _is_adapter_off(recipe: OnlineRecipe, kept: Keeping, roles: Sequence[str], role: str) -> bool:
    """The reference is the policy's base, which the snapshot beside it has already."""
    return role == "reference" and kept.adapter is not None and recipe.reference is None and "policy_snapshot" in roles


# ── train ────────────────────────────────────────────────────────────────────────────────────────


def train_items(kept: Keeping, shapes: Sequence[ModelShape], ranks: int, tokens: int, apart: float = 0.0) -> tuple[Items, Items, Items]:
    """(on each GPU, in host memory for each, on NVMe for each) of models trained together on `ranks` GPUs.

    Mixed precision (Rajbhandari et al. 2020, §3.1): 2 bytes a parameter for weights, 4 for gradients, which are summed in fp32, 12
    for the fp32 copy and Adam's two moments; in fp32 4 + 4 + 8, and 4 for the copy that ZeRO makes even so. ZeRO-1 shares out the last,
    ZeRO-2 the gradients too, ZeRO-3 all three. Below ZeRO-2 DeepSpeed keeps the gradients in 16 bits besides. In host memory there are
    two gradients: the sum, and what Adam is given of it. (tests/models/test_kept_bytes.py counts what is really kept.)

    Args:
        tokens: of one rank at a time.
        apart: parameters, times the gradients that are kept apart for each.
    """
    stage, offloaded = kept.stage, kept.optimizer_place != "none"
    trained = sum(kept.trained(shape) for shape in shapes)
    weights = sum(kept.weight_bytes(shape) for shape in shapes) / (ranks if stage == 3 else 1)
    gradients = 4 * trained / ranks if stage >= 2 else (4 + 2 * (kept.size == 2)) * trained
    states = (12 if kept.size == 2 or stage else 8) * trained / (ranks if stage else 1)
    items: Items = {}
    host: Items = {}
    disk: Items = {}
    elsewhere = {"none": items, "cpu": host, "nvme": disk}
    elsewhere[kept.weights_place]["trained weights"] = weights
    (host if offloaded and stage >= 2 else items)["gradients"] = gradients
    elsewhere[kept.optimizer_place]["optimizer"] = states
    if offloaded:
        host["gradients for Adam"] = 4 * trained / ranks
    if apart:
        items["gradients kept apart"] = apart * 4
    items |= _gathered(kept, shapes, "gathered layers", when=stage == 3 and (ranks > 1 or kept.weights_place != "none"))
    if stage >= 2 and ranks > 1:
        largest = max(shape.vocab * shape.hidden for shape in shapes)
        elements = max(largest, min(sum(shape.parameters for shape in shapes), REDUCED_ELEMENTS))
        items["reduced at a time"] = elements * ((2 if stage == 2 else 1) * kept.size + 4)
    items["train activations"] = max(_activations(kept, shape, tokens) for shape in shapes) + LOGITS_BYTES
    return items, host, disk


def _gathered(kept: Keeping, shapes: Sequence[ModelShape], name: str, *, when: bool) -> Items:
    """Layers that ZeRO-3 has put together for their use: those that come next, or embedding or output layer with two layers where these
    are more."""
    if not when:
        return {}
    live = max(min(s.parameters, max(LIVE_PARAMETERS, 2 * s.layer_parameters + s.vocab * s.hidden)) for s in shapes)
    return {name: live * kept.size}


def apart_gradients(recipe: OnlineRecipe, role: str) -> int:
    """Full gradients in fp32 that `normalize: streaming_exact` keeps apart from the trainer's own: of the advantages, of ones, and of
    the losses that are not the policy's."""
    algorithm = recipe.algorithm
    if role != "actor" or algorithm.normalize != "streaming_exact":
        return 0
    return 2 + (algorithm.entropy_coef > 0 or (algorithm.kl_in == "loss" and recipe.uses_reference))


def _activations(kept: Keeping, shape: ModelShape, tokens: int) -> float:
    """Of one rank's tokens. Recomputation keeps each layer's input and one layer's whole set (Korthikanti et al. 2022, §5)."""
    a_layer = float(shape.layer_activations * tokens * kept.size)
    return shape.hidden * tokens * kept.size * shape.layers + a_layer if kept.checkpointing else a_layer * shape.layers
