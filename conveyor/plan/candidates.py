"""The placements that a search looks at.

Left out: a critic on a group of its own (it goes with the actor), reward roles on groups of their own, devices shared by fractions,
and engines with tensor parallelism on a group that also trains (a slot of a group holds one rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conveyor.config import OnlineRecipe
from conveyor.config.rules import broken_rules
from conveyor.plan.lengths import LengthFacts
from conveyor.plan.memory import scored_weights
from conveyor.plan.predict import CostSource

LARGEST_CONCURRENCY = 1024
WHOLE_SHARE = 0.85
"""Of a GPU, that whole score models may take; the rest is for their activations and what the GPU itself needs."""


def candidates(
    recipe: OnlineRecipe, source: CostSource, lengths: LengthFacts, devices: int, tensor_parallel: Sequence[int]
) -> Iterator[OnlineRecipe]:
    """Every placement looked at that a recipe may have; which of them fit is not asked here."""
    for split in _splits(recipe, devices, tensor_parallel):
        placed = _score_in_parts(split, source, lengths)
        assert placed.devices is not None
        engines = int(placed.devices[placed.role_group("rollout")]) // placed.rollout.tensor_parallel_size
        ranks = int(placed.devices[placed.role_group("actor")])
        for size in _micro_batch_sizes(recipe, ranks):
            sized = with_keys(placed, pipeline={"micro_batch_size": size})
            for concurrency in _concurrencies(sized, source, lengths, engines):
                made = with_keys(sized, rollout={"max_concurrent_requests": concurrency})
                if not broken_rules(made):
                    yield made


def _splits(recipe: OnlineRecipe, devices: int, tensor_parallel: Sequence[int]) -> Iterator[OnlineRecipe]:
    """All devices are used: what score and train leave is rollout's. A recipe that scores with no model has no score devices."""
    scores = bool(recipe.score_roles or recipe.snapshot_roles)
    with_train = {"score": "train"} if scores else {}
    if 1 in tensor_parallel:
        yield _placed(recipe, {"train": devices}, {"rollout": "train", **with_train}, 1)
    for train in _counts(devices - 1):
        for score in (0, *(_counts(devices - train - 1) if scores else ())):
            rollout = devices - train - score
            for width in tensor_parallel:
                if rollout % width == 0:
                    groups = {"rollout": rollout, "score": score, "train": train}
                    yield _placed(recipe, {g: n for g, n in groups.items() if n}, {} if score else with_train, width)


def _score_in_parts(recipe: OnlineRecipe, source: CostSource, lengths: LengthFacts) -> OnlineRecipe:
    """With score models in parts over their group, where one GPU cannot hold them whole."""
    group = next((recipe.role_group(role) for role in (*recipe.score_roles, *recipe.snapshot_roles)), None)
    if group is None or recipe.score.zero_stage == 3:
        return recipe
    table = next((table for table in source.memory(recipe, lengths) if table.group == group), None)
    weights = sum(size for name, size in table.items.items() if name in scored_weights(recipe, group)) if table is not None else 0.0
    return with_keys(recipe, score={"zero_stage": 3}) if table is not None and weights > WHOLE_SHARE * table.limit else recipe


def _counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, …: powers of two and three times those."""
    counts = {base << power for base in (1, 3) for power in range(most.bit_length())}
    return sorted(count for count in counts if count <= most)


def _placed(recipe: OnlineRecipe, devices: dict[str, int], roles: dict[str, str], width: int) -> OnlineRecipe:
    placed = with_keys(recipe, rollout={"tensor_parallel_size": width})
    return placed.model_copy(update={"devices": {group: float(count) for group, count in devices.items()}, "roles": roles})


def _micro_batch_sizes(recipe: OnlineRecipe, ranks: int) -> list[int]:
    """1, 2, 4, 8 samples a rank, and the recipe's own; no rank without work, no more than an update."""
    own, n = recipe.pipeline.micro_batch_size, recipe.samples_per_update
    return sorted(size for size in {own, *(ranks * k for k in (1, 2, 4, 8))} if min(ranks, n) <= size <= n)


def _concurrencies(recipe: OnlineRecipe, source: CostSource, lengths: LengthFacts, engines: int) -> list[int]:
    """The recipe's own, halved too (waves: first micro-batches come earlier); where memory is known, instead all that fits."""
    n, most = recipe.samples_per_group, recipe.rollout.max_concurrent_requests
    table = next((t for t in source.memory(recipe, lengths) if t.group == recipe.role_group("rollout")), None)
    if table is not None:
        cache = table.items["KV cache"]
        most = min(LARGEST_CONCURRENCY, int((table.limit - table.total + cache) / (cache / most)))
    # More than an engine's share of the samples in flight changes nothing.
    most = min(most, -(-recipe.samples_per_step * (recipe.pipeline.max_staleness + 1) // engines))
    least = n if recipe.evaluate is None else max(n, recipe.evaluate.n_samples_per_prompt + recipe.evaluate.greedy)
    found = {max(size, least) // n * n for size in (most, most // 2, most // 4)}
    # Where not even one group fits, the check of memory says so.
    return sorted(size for size in found if size >= least) or [-(-least // n) * n]


def with_keys(recipe: OnlineRecipe, **sections: dict[str, Any]) -> OnlineRecipe:
    """A copy with changed keys, which are known to be sound."""
    return recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in sections.items()})
