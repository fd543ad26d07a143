"""Costs from first principles: a task takes as long as its arithmetic, its memory traffic or its communication, whichever is longest.

The idea is the roofline model's (Williams, Waterman, Patterson 2009); for transformers see Kaplan et al. 2020 (arithmetic), Pope et al.
2022 (decoding) and Rajbhandari et al. 2020 (ZeRO's communication). How much of the data sheet programs get: `hardware.py`. Weights
travel by NCCL; over Ray's object store they take longer.

Left out: the rows of `ptx`, which are few beside the samples of an update; the first steps of `train.critic_warmup_steps`, in which the
actor is not trained; and that a teacher (`reference`) may be larger than the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from conveyor.config import OnlineRecipe
from conveyor.data.balance import micro_batches
from conveyor.pipeline.run_plan import ScorePart, TrainGroup, train_groups
from conveyor.plan import hardware
from conveyor.plan.costs import installed_roles
from conveyor.plan.engines import Iterations
from conveyor.plan.hardware import GPU
from conveyor.plan.keeping import BYTES, Keeping, keeping
from conveyor.plan.lengths import LengthFacts, Size
from conveyor.plan.memory import GroupMemory, Shapes, apart_gradients, engine_bytes, group_memory, score_shards, scored_roles
from conveyor.plan.models import ModelShape
from conveyor.types import SampleId

CHECKPOINT_BANDWIDTH = 1e9
"""Bytes/s that a rank writes to disk."""


@dataclass(frozen=True)
class Roofline:
    """Costs and memory of any placement of a recipe's roles on one kind of GPU."""

    shapes: Shapes
    gpu: GPU
    judge_seconds: float = 0.0
    """Of functions and urls, a sample: no data sheet tells."""

    def costs(self, recipe: OnlineRecipe) -> RooflineCosts:
        return RooflineCosts(recipe, self.shapes, self.gpu, judge_seconds=self.judge_seconds)

    def sleeping(self, recipe: OnlineRecipe) -> dict[str, str]:
        return recipe.sleeping_groups(gpus=True)

    def shards(self, recipe: OnlineRecipe, group: str) -> int:
        return score_shards(recipe, group)

    def memory(self, recipe: OnlineRecipe, lengths: LengthFacts) -> list[GroupMemory]:
        return group_memory(recipe, self.shapes, self.gpu, lengths)


@dataclass(frozen=True)
class RooflineCosts:
    """The cost model of one recipe with `devices`."""

    recipe: OnlineRecipe
    shapes: Shapes
    gpu: GPU
    latency: float = hardware.LATENCY_SECONDS
    judge_seconds: float = 0.0

    @property
    def devices(self) -> dict[str, int]:
        assert self.recipe.devices is not None
        return {group: max(1, int(count)) for group, count in self.recipe.devices.items()}

    @cached_property
    def _kept(self) -> Keeping:
        return keeping(self.recipe)

    # ── rollout ──────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def engine(self) -> Iterations:
        """Decoding reads all weights and the cache of every running sample once an iteration, and does 2 operations a parameter
        for each sample. With tensor parallelism everything is split, and each layer adds two all-reduces of its hidden state,
        2 (w − 1)/w of the bytes of it each."""
        shape, gpu, width, size = self.shapes.policy, self.gpu, self.recipe.rollout.tensor_parallel_size, engine_bytes(self.recipe)
        read, flops = gpu.bandwidth * hardware.BANDWIDTH_EFFICIENCY * width, gpu.flops * hardware.FORWARD_EFFICIENCY * width
        reductions = 2 * shape.layers if width > 1 else 0
        sent = reductions * 2 * (width - 1) / width * shape.hidden * size / gpu.link(width)
        # An embedding is looked up, not multiplied with: one matrix of vocabulary size is read, the output layer's.
        used = shape.read_parameters(self.recipe.rollout.max_concurrent_requests) + shape.vocab * shape.hidden
        return Iterations(
            constant=hardware.ITERATION_SECONDS + reductions * hardware.COLLECTIVE_SECONDS,
            per_sample=hardware.SAMPLE_SECONDS + sent,
            weights=used * size / read,
            compute=(shape.token_flops + shape.head_flops) / flops,
            per_cached_token=shape.cache_bytes(size) / (read / width * min(width, shape.kv_heads)),
            per_prompt_token=shape.token_flops / flops + sent,
        )

    # ── score ────────────────────────────────────────────────────────────────────────────────────

    def score(self, part: ScorePart, samples: Sequence[Size]) -> float:
        shards = score_shards(self.recipe, part.group)
        return hardware.TASK_SECONDS + sum(self._forward(role, samples, shards) for role in part.roles)

    def judge(self, sample: SampleId) -> float:
        return self.judge_seconds

    def _forward(self, role: str, samples: Sequence[Size], shards: int) -> float:
        """Weights spread over several GPUs are fetched a layer at a time."""
        shape = self.shapes.of(role)
        weights = self._kept.weight_bytes(shape)
        arithmetic = self._flops(role, samples) / (self.gpu.flops * hardware.FORWARD_EFFICIENCY * shards)
        reading = weights / (self.gpu.bandwidth * hardware.BANDWIDTH_EFFICIENCY)
        fetching = weights * (shards - 1) / shards / self.gpu.link(shards)
        return _together(max(arithmetic, reading), fetching)

    def _flops(self, role: str, samples: Sequence[Size]) -> float:
        """Of a forward pass; the output layer sees response tokens only. With padding every sample costs what the longest does."""
        if not samples:
            return 0.0
        shape = self.shapes.of(role)
        head = shape.head_flops if role in ("actor", "reference", "policy_snapshot") else 0.0
        if self.recipe.model.remove_padding:
            lengths = [(size.total, size.response) for size in samples]
        else:
            lengths = [(max(size.total for size in samples), max(size.response for size in samples))] * len(samples)
        return sum(shape.token_flops * total + shape.attention_flops(total) + head * response for total, response in lengths)

    # ── train ────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, group: TrainGroup, samples: Sequence[Size]) -> float:
        return hardware.TASK_SECONDS / 5

    def train(self, group: TrainGroup, samples: Sequence[Size]) -> float:
        """The slowest rank's share: a backward pass is two forward ones, or one where the weights stay as they are (adapters),
        recomputation one more, and gradients kept apart (`memory.apart_gradients`) are a backward pass each."""
        train, ranks = self.recipe.train, self.devices[group.group]
        backward = (2 if self._kept.adapter is None else 1) + self.recipe.model.gradient_checkpointing
        passes = {role: 1 + backward * max(1, apart_gradients(self.recipe, role)) for role in group.roles}
        of_row = train.sequence_parallel_size
        cut = micro_batches([size.total for size in samples], ranks // of_row, train.row_tokens)
        arithmetic = 0.0
        for shares in cut:
            flops = [sum(passes[role] * self._flops(role, [samples[i] for i in share]) for role in group.roles) for share in shares]
            arithmetic += max(flops) / of_row / (self.gpu.flops * hardware.TRAIN_EFFICIENCY)
        return hardware.TASK_SECONDS + _together(arithmetic, len(cut) * self._communication(group, ranks))

    def _communication(self, group: TrainGroup, ranks: int) -> float:
        """Of one micro-batch. ZeRO-3 fetches the weights in the forward and again in the backward pass; ZeRO-2 and 3 reduce fp32
        gradients after each; below, they are reduced once an update."""
        stage = self._kept.stage
        fetched = 2 * sum(self._kept.weight_bytes(self.shapes.of(role)) for role in group.roles) if stage == 3 else 0.0
        reduced = 4 * self._parameters(group) if stage >= 2 else 0.0
        return (fetched + reduced) * (ranks - 1) / ranks / self.gpu.link(ranks)

    def update(self, group: TrainGroup) -> float:
        """Adam reads and writes its 12 bytes a parameter, reads gradients and writes weights: 30 bytes. Offloaded, the same happens in
        host memory, and gradients and weights cross over."""
        stage, parameters, ranks = self._kept.stage, self._parameters(group), self.devices[group.group]
        own = parameters / (ranks if stage >= 1 else 1)
        size = BYTES[self.recipe.model.dtype]
        if self._kept.optimizer_place != "none":
            stepping = own * (30 / hardware.HOST_BANDWIDTH + (4 + size) / self.gpu.host_link)
        else:
            stepping = own * 30 / (self.gpu.bandwidth * hardware.BANDWIDTH_EFFICIENCY)
        a_parameter = {0: 2 * 4, 1: 4 + size, 2: size, 3: 0}[stage]
        return hardware.TASK_SECONDS + stepping + parameters * a_parameter * (ranks - 1) / ranks / self.gpu.link(ranks)

    def _parameters(self, group: TrainGroup) -> float:
        """Those that are trained, and so travel."""
        return float(sum(self._kept.trained(self.shapes.of(role)) for role in group.roles))

    # ── weights ──────────────────────────────────────────────────────────────────────────────────

    def publish(self, group: TrainGroup) -> float:
        """ZeRO-3 gathers the shards of a bucket; the others have whole weights on every rank."""
        ranks = self.devices[group.group]
        if self.recipe.train.zero_stage < 3:
            return hardware.TASK_SECONDS
        sent = self._parameters(group) * BYTES[self.recipe.model.dtype] * (ranks - 1) / ranks
        return hardware.TASK_SECONDS + sent / self.gpu.link(ranks)

    def install_engine(self) -> float:
        return self._broadcast(self.shapes.policy)

    def install_snapshot(self, part: ScorePart) -> float:
        """Snapshots are received one after the other."""
        return sum(self._broadcast(self.shapes.of(role)) for role in installed_roles(part))

    def _broadcast(self, shape: ModelShape) -> float:
        """All receivers at once, in a chain of chunks: about one crossing of the slowest link, however many they are."""
        receivers = sum(self.devices.values()) - 1
        return hardware.TASK_SECONDS + self._kept.trained(shape) * BYTES[self.recipe.model.dtype] / self.gpu.broadcast_link(receivers)

    def checkpoint(self, group: TrainGroup) -> float:
        return self._parameters(group) * 14 / self.devices[group.group] / CHECKPOINT_BANDWIDTH

    def finish(self, group: TrainGroup) -> float:
        return 0.0

    def move(self, group: str, stage: str) -> float:
        """What a device holds of the stage crosses to host memory, or back: weights, and of trained models gradients and Adam's 12
        bytes a parameter, unless those wait there anyway."""
        recipe, size = self.recipe, BYTES[self.recipe.model.dtype]
        if stage == "rollout":
            held = self.shapes.policy.parameters * engine_bytes(recipe) / recipe.rollout.tensor_parallel_size
        elif stage == "score":
            parameters = sum(self.shapes.of(role).parameters for role in scored_roles(recipe, group))
            held = parameters * size / score_shards(recipe, group)
        else:
            zero, ranks = recipe.train.stage(recipe.model.dtype), self.devices[group]
            adam = 0 if recipe.train.offload_optimizer not in (False, "none") else 12 / (ranks if zero >= 1 else 1)
            a_parameter = size / (ranks if zero == 3 else 1) + 4 / (ranks if zero >= 2 else 1) + adam
            held = sum(self._parameters(of) for of in train_groups(recipe) if of.group == group) * a_parameter
        return hardware.TASK_SECONDS + held / self.gpu.host_link


def _together(one: float, other: float) -> float:
    """Seconds of two things of which a part of the shorter hides behind the longer."""
    return max(one, other) + (1 - hardware.OVERLAP) * min(one, other)
