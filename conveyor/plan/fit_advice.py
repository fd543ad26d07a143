"""What to change in a recipe whose roles do not fit the memory: settings that are tried one after the other, until they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from conveyor.config import OnlineRecipe
from conveyor.plan.candidates import with_keys
from conveyor.plan.keeping import keeping
from conveyor.plan.memory import GroupMemory, scored_roles

Tables = Callable[[OnlineRecipe], list[GroupMemory]]
WIDEST = 8
"""Tensor parallel: GPUs of one node."""


Change = tuple[str, dict[str, dict[str, Any]]]
"""In words, and as keys of sections."""


def advice(recipe: OnlineRecipe, group: str, tables: Tables) -> str:
    """`key value, key value`: changes, of those that cost least speed as few as needed, that together make the group fit; or that no
    setting does. `tables`: the memory of a recipe."""

    def full(changes: list[Change]) -> float:
        """Share of a GPU that is taken."""
        changed = recipe
        for _, keys in changes:
            changed = with_keys(changed, **keys)
        table = next(table for table in tables(changed) if table.group == group)
        return table.total / table.limit

    made: list[Change] = []
    for change in _changes(recipe, group):
        others = [one for one in made if _key(one) != _key(change)]
        if full([*others, change]) < full(made):
            made = [*others, change]
        if full(made) <= 1:
            break
    more = f"devices.{group}: more GPUs, or a smaller model"
    if full(made) > 1:
        return ", ".join([words for words, _ in made] + ([f"and then {more}"] if made else [more]))
    for change in list(made):
        if full([one for one in made if one is not change]) <= 1:
            made.remove(change)
    return ", ".join(words for words, _ in made)


def _key(change: Change) -> str:
    return change[0].partition(" ")[0]


def _changes(recipe: OnlineRecipe, group: str) -> Iterator[Change]:
    kept, n = keeping(recipe), recipe.samples_per_group
    if recipe.role_group("rollout") == group:
        width, slots = recipe.rollout.tensor_parallel_size, int((recipe.devices or {})[group])
        for wider in (2, 4, 8):
            if width < wider <= WIDEST and slots % wider == 0 and not recipe.beside_rollout:
                yield f"rollout.tensor_parallel_size {wider}", {"rollout": {"tensor_parallel_size": wider}}
        if recipe.beside_rollout:  # the engine takes its share of the GPU, whatever it needs
            for tenths in range(9, 1, -1):
                if tenths / 10 < recipe.rollout.gpu_memory_utilization:
                    yield f"rollout.gpu_memory_utilization {tenths / 10}", {"rollout": {"gpu_memory_utilization": tenths / 10}}
        for share in (2, 4):
            fewer = recipe.rollout.max_concurrent_requests // share // n * n
            if fewer >= n:
                yield f"rollout.max_concurrent_requests {fewer}", {"rollout": {"max_concurrent_requests": fewer}}
    if scored_roles(recipe, group):
        if kept.score_stage == 0:
            yield "score.zero_stage 3", {"score": {"zero_stage": 3}}
        if kept.score_place == "none":
            words = "score.offload_parameters cpu" if kept.score_stage == 3 else "score.zero_stage 3, score.offload_parameters cpu"
            yield words, {"score": {"zero_stage": 3, "offload_parameters": "cpu"}}
    if group in (recipe.role_group("actor"), recipe.role_group("critic")):
        yield from _of_trainers(recipe)


def _of_trainers(recipe: OnlineRecipe) -> Iterator[Change]:
    kept, longest = keeping(recipe), recipe.data.max_prompt_length + recipe.rollout.max_response_length
    if recipe.model.dtype == "float32":
        yield "model.dtype bfloat16", {"model": {"dtype": "bfloat16"}}
    if not kept.checkpointing:
        yield "model.gradient_checkpointing true", {"model": {"gradient_checkpointing": True}}
    if kept.row_limit is None or kept.row_limit > longest:
        yield f"train.max_tokens_per_micro_batch {longest}", {"train": {"max_tokens_per_micro_batch": longest}}
    if kept.stage < 3:
        yield "train.zero_stage 3", {"train": {"zero_stage": 3}}
    if kept.optimizer_place == "none":
        yield "train.offload_optimizer cpu", {"train": {"offload_optimizer": "cpu"}}
