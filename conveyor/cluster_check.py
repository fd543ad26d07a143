"""`conveyor check RECIPE --cluster 4x8`: whether a recipe's devices, placement and memory suit a cluster, without a GPU of it, and
without the files that the recipe names: shapes of models come from their configurations, or from `plan/known_models.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import AutoConfig

from conveyor.checks import devices_per_worker
from conveyor.config import OfflineRecipe, OnlineRecipe, Recipe, UserError, sections
from conveyor.plan.fit_advice import advice
from conveyor.plan.hardware import GPUS, RESERVED_BYTES
from conveyor.plan.keeping import keeping
from conveyor.plan.known_models import model_shape
from conveyor.plan.layout import Cluster, parse_cluster, told
from conveyor.plan.lengths import LengthFacts, Workload
from conveyor.plan.memory import GroupMemory, Items, Shapes, group_memory, train_items
from conveyor.plan.models import ModelShape, shape_from_config
from conveyor.workers.cluster import Devices, available, check_devices, default_devices
from conveyor.workers.nodes import Node, assign, strategies

GIB = 2**30
SMALLEST = 0.05
"""GiB; less is left out of tables."""


@dataclass(frozen=True, slots=True)
class Named:
    """Sizes that stand for models whose shape is not known: `--model`, `--reward-model`."""

    policy: str | None = None
    reward: str | None = None


def check_on(recipe: Recipe, cluster: Cluster, named: Named = Named()) -> str:
    """The layout and the memory table, when everything fits.

    Raises:
        UserError: one line: what does not fit, and what would.
    """
    if isinstance(recipe, OnlineRecipe):
        return _online(recipe, cluster, named)
    if isinstance(recipe, OfflineRecipe):
        return _offline(recipe, cluster, named)
    raise UserError(f"--cluster: {recipe.method} samples and fits in turn; check a recipe that samples and one that trains")


def named_cluster(text: str, ray_section: sections.Ray) -> Cluster:
    """That of `--cluster`; `ray`: what the cluster that the recipe would join has, or this machine. Ray does not tell the memory of GPUs:
    80 GiB."""
    if text != "ray":
        return parse_cluster(text)
    there = available(ray_section)
    if there.kind != "GPU":
        raise UserError(f"--cluster: ray: the cluster has {there} and no GPUs")
    return Cluster(tuple(int(node.devices) for node in there.nodes) or (int(there.count),))


def _online(recipe: OnlineRecipe, cluster: Cluster, named: Named) -> str:
    devices = dict(recipe.devices or default_devices(recipe, Devices("GPU", cluster.gpus)))
    recipe = recipe.model_copy(update={"devices": devices})
    layout = _layout(devices, cluster, devices_per_worker(recipe), recipe.ray.placement)
    tables = tables_of(recipe, shapes_of(recipe, named), cluster)
    for table in tables:
        if not table.fits:
            change = advice(recipe, table.group, lambda changed: tables_of(changed, shapes_of(changed, named), cluster))
            raise UserError(_too_much(table, change))
    assumed = f"KV cache for {recipe.rollout.max_concurrent_requests} samples of a quarter of max_response_length in the mean"
    return "\n".join([*layout, "", *memory_lines(tables, devices, cluster), "", assumed])


def tables_of(recipe: OnlineRecipe, shapes: Shapes, cluster: Cluster) -> list[GroupMemory]:
    """As `group_memory`; an engine that shares its GPUs takes `rollout.gpu_memory_utilization` of them, whatever it needs."""
    gpu = replace(GPUS["h100"], memory=cluster.gib * GIB)
    tables = group_memory(recipe, shapes, gpu, lengths_of(recipe))
    return [_with_whole_engine(recipe, table, gpu.memory) if recipe.beside_rollout else table for table in tables]


def _with_whole_engine(recipe: OnlineRecipe, table: GroupMemory, memory: float) -> GroupMemory:
    if "KV cache" not in table.items:
        return table
    without = table.items["engine weights"] + table.items["engine activations"]
    room = memory * recipe.rollout.gpu_memory_utilization - without
    return replace(table, items=table.items | {"KV cache": max(room, table.items["KV cache"])})


def lengths_of(recipe: OnlineRecipe) -> LengthFacts:
    """What `conveyor plan` assumes where nothing is said: lognormal responses with a quarter of `rollout.max_response_length` in the
    mean, prompts of half of `data.max_prompt_length`; the longest sample is as long as the recipe allows."""
    longest, prompt = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    law = f"lognormal:mean={max(1.0, longest / 4):g},sigma=0.8,cap={longest}"
    drawn = Workload.draw(law, 512, 8, max(1, prompt // 2)).facts
    return LengthFacts(drawn.prompt, drawn.response, drawn.resident, prompt + longest)


def _offline(recipe: OfflineRecipe, cluster: Cluster, named: Named) -> str:
    devices = dict(recipe.devices or default_devices(recipe, Devices("GPU", cluster.nodes[0])))
    layout = _layout(devices, cluster, {}, recipe.ray.placement)
    shape, kept, ranks = _shape(recipe.model.path, "model.path", named.policy), keeping(recipe), max(1, int(devices["train"]))
    if recipe.method in ("reward_model", "process_reward_model"):
        shape = shape.as_scalar()
    items, host, disk = train_items(kept, [shape], ranks, kept.rank_tokens(recipe.train.micro_batch_size, recipe.data.max_length, ranks))
    table = GroupMemory(
        "train", {"reserved": RESERVED_BYTES, **items}, cluster.gib * GIB * min(1.0, devices["train"]), host=host, disk=disk
    )
    if not table.fits:
        raise UserError(
            _too_much(table, "train.zero_stage 3, train.offload_optimizer, model.gradient_checkpointing, lora or a smaller micro-batch")
        )
    return "\n".join([*layout, "", *memory_lines([table], devices, cluster)])


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def _layout(devices: dict[str, float], cluster: Cluster, sizes: dict[str, int], placement: Mapping[str, sections.Strategy]) -> list[str]:
    """What lies on which node."""
    for group, size in sizes.items():
        if size > max(cluster.nodes):
            raise UserError(
                f"rollout.tensor_parallel_size: {size}: an engine's GPUs are of one node, and the largest has {max(cluster.nodes)} "
                f"(group {group})"
            )
    nodes = [Node(str(number), f"node {number}", gpus, gpus) for number, gpus in enumerate(cluster.nodes)]
    slots = check_devices(devices, Devices("GPU", cluster.gpus, tuple(nodes)), sizes, placement)
    found = assign(strategies(slots, placement), nodes)
    assert found is not None, "checked above"
    places = {group: [int(node) for node in of_slots] for group, of_slots in found.items()}
    return [f"on {cluster}", *(f"  {line}" for line in told(places, slots, len(cluster.nodes)))]


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def shapes_of(recipe: OnlineRecipe, named: Named = Named()) -> Shapes:
    """Shapes of all models that a recipe names. Raises UserError for one that is not known."""
    policy = _shape(recipe.model.path, "model.path", named.policy)
    roles = {reward.name: _shape(str(reward.model), f"rewards.{reward.name}.model", named.reward) for reward in recipe.model_rewards}
    if recipe.reference is not None:
        roles["reference"] = _shape(recipe.reference.path, "reference.path", None)
    if recipe.uses_critic:
        roles["critic"] = policy if recipe.critic is None else _shape(recipe.critic.path, "critic.path", named.reward)
    return Shapes(policy, policy, roles)


def _shape(path: str, key: str, named: str | None) -> ModelShape:
    """By the size given for it, by its name, by its folder, by what the hub has left on this machine."""
    if named is not None:
        return model_shape(named, "--reward-model" if key != "model.path" else "--model")
    try:
        return model_shape(path, key)
    except UserError as unknown:
        try:
            return shape_from_config(AutoConfig.from_pretrained(path, local_files_only=True).to_dict())
        except (OSError, ValueError, KeyError, TypeError):
            option = "--model" if key == "model.path" else "--reward-model"
            raise UserError(f"{unknown}; say {option} SIZE") from None


# ── what is shown ────────────────────────────────────────────────────────────────────────────────


def memory_lines(tables: Sequence[GroupMemory], devices: dict[str, float], cluster: Cluster) -> list[str]:
    """A table with a column for each group: GiB on each of its GPUs, by what they are for."""
    heads = ["GiB a GPU", *(f"{table.group} ({devices[table.group]:g})" for table in tables)]
    rows = [[name, *(_gib(table.items.get(name)) for table in tables)] for name in _names([table.items for table in tables])]
    rows.append(["at a time" if any(table.turns for table in tables) else "sum", *(_gib(table.total) for table in tables)])
    rows.append(["of", *(_gib(table.limit) for table in tables)])
    for words, of in (("host memory", [table.host for table in tables]), ("NVMe", [table.disk for table in tables])):
        if any(sum(items.values()) / GIB >= SMALLEST for items in of):
            rows.append([f"{words}, for each GPU", *(_gib(sum(items.values()) or None) for items in of)])
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join((row[0].ljust(widths[0]), *numbers)).rstrip()

    return [line(row) for row in (heads, *rows)]


def _names(items: Sequence[Items]) -> list[str]:
    """In the order of the tables; small ones are left out."""
    found: dict[str, float] = {}
    for table in items:
        for name, size in table.items():
            found[name] = max(found.get(name, 0.0), size)
    return [name for name, size in found.items() if size / GIB >= SMALLEST]


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"


def _too_much(table: GroupMemory, change: str) -> str:
    largest = sorted(table.items.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    much = f"{table.total / GIB:.1f} GiB a GPU do not fit {table.limit / GIB:.1f}"
    return f"devices.{table.group}: {much} ({parts}, …); what would help: {change}"
