"""How long a step takes, roughly and at once: to order placements by, before any is simulated.

Left out: judging by functions and urls, which takes no device and so is the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from conveyor.config import OnlineRecipe
from conveyor.pipeline.run_plan import RunPlan
from conveyor.plan.costs import CostModel
from conveyor.plan.engines import Iterations
from conveyor.plan.lengths import LengthFacts, Workload
from conveyor.plan.predict import CostSource, plan_of
from conveyor.types import SampleId


@dataclass(frozen=True)
class StageSeconds:
    """How long the stages of a step take, each on its own."""

    groups: dict[str, float]
    """Device group → seconds of its score and train tasks."""
    rollout_group: str
    sampling: float
    """With full engines."""
    longest: float
    """Of the longest sample."""
    closing: float
    """Last update, publish, install."""
    batches: int
    streams: bool
    """Micro-batches need not wait for one another: overlap is on, and no whitening over the step."""
    overlap: bool

    def step(self, staleness: int) -> float:
        """Roughly: the flow shop's (G+F+T)/m + (1 − 1/m)·max(G, F, T) on-policy, the longest of the three with staleness; stages on
        one device group count as one."""
        ahead = staleness > 0 and self.overlap
        times = dict(self.groups)
        times[self.rollout_group] = times.get(self.rollout_group, 0.0) + (self.sampling if ahead else max(self.sampling, self.longest))
        if ahead:
            return max(times.values()) + self.closing
        if not self.streams:
            return sum(times.values()) + self.closing
        return sum(times.values()) / self.batches + (1 - 1 / self.batches) * max(times.values()) + self.closing


def stage_seconds(recipe: OnlineRecipe, source: CostSource, workload: Workload) -> StageSeconds:
    """Of a recipe with `devices`, from its first micro-batch and the means of the workload."""
    costs, plan = source.costs(recipe), plan_of(recipe, source, 1)
    sample = workload.sizes([SampleId(i // plan.samples_per_group, i % plan.samples_per_group) for i in range(plan.micro_batch_size)])
    batches = -(-recipe.samples_per_step // plan.micro_batch_size)
    updates = plan.update_epochs * (recipe.samples_per_step // recipe.samples_per_update)
    groups: dict[str, float] = defaultdict(float)
    for part, workers in zip(plan.parts, plan.part_workers, strict=True):
        groups[part.group] += costs.score(part, sample) * -(-batches // workers)
    for group in plan.train_groups:
        groups[group.group] += costs.train(group, sample) * batches * plan.update_epochs + costs.update(group) * (updates - 1)
    closing = max(costs.update(group) + costs.publish(group) for group in plan.train_groups) + costs.install_engine()
    sampled = _sampled_share(plan, workload)
    sampling, longest = _rollout_seconds(recipe, costs, workload.facts, plan.engines / sampled)
    overlap, barrier = recipe.pipeline.overlap, recipe.needs_barrier and updates == plan.update_epochs
    return StageSeconds(
        dict(groups), plan.rollout_group, sampling, longest, closing, batches, streams=overlap and not barrier, overlap=overlap
    )


def _sampled_share(plan: RunPlan, workload: Workload) -> float:
    """Groups sampled for each that is trained: more than one where dynamic sampling leaves some out."""
    if plan.groups_sampled_at_most is None:
        return 1.0
    limit = plan.groups_sampled_at_most / plan.step_groups[0]
    return limit if workload.equal_share >= 1 else min(limit, 1 / (1 - workload.equal_share))


def _rollout_seconds(recipe: OnlineRecipe, costs: CostModel, lengths: LengthFacts, engines: float) -> tuple[float, float]:
    """(seconds to sample a step with full engines, seconds of its longest sample)."""
    model = costs.engine
    assert isinstance(model, Iterations), "only engines that iterate can be estimated"
    share = recipe.samples_per_step / engines
    running = min(float(recipe.rollout.max_concurrent_requests), share)
    an_iteration = model.seconds(running, running * lengths.resident)
    prompts = share / recipe.samples_per_group * lengths.prompt * model.per_prompt_token
    sampling = share * lengths.response / running * an_iteration + prompts
    return sampling, (lengths.longest - lengths.prompt) * model.seconds(running / 2, running / 2 * lengths.resident)
