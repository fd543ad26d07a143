"""A recipe with its placement, and what the simulator says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from conveyor.config import OnlineRecipe
from conveyor.pipeline.run_plan import RunPlan, run_plan
from conveyor.plan.costs import CostModel
from conveyor.plan.lengths import LengthFacts, Workload
from conveyor.plan.memory import GroupMemory
from conveyor.plan.simulate import Simulation, simulate


class CostSource(Protocol):
    """Where costs come from: a run (`fit.Profile`) or the data sheet (`roofline.Roofline`)."""

    def costs(self, recipe: OnlineRecipe) -> CostModel: ...

    def shards(self, recipe: OnlineRecipe, group: str) -> int:
        """Devices of one score worker of the group."""

    def sleeping(self, recipe: OnlineRecipe) -> dict[str, str]:
        """`recipe.sleeping_groups` on such devices."""

    def memory(self, recipe: OnlineRecipe, lengths: LengthFacts) -> list[GroupMemory]:
        """Empty: not known, taken to fit."""


@dataclass(frozen=True)
class Prediction:
    """A recipe with its placement, and what the simulator says of it."""

    recipe: OnlineRecipe
    step_seconds: float
    idle: dict[str, float]
    memory: list[GroupMemory]

    @property
    def device_hours_per_1000(self) -> float:
        """Device-hours for 1,000 samples, idle ones included."""
        return self.step_seconds / 3600 * sum((self.recipe.devices or {}).values()) * 1000 / self.recipe.samples_per_step


def simulated_steps(staleness: int) -> int:
    """So many that what is measured, without the steps in which the pipeline fills and runs empty, is 2 steps or more: stages that
    take turns repeat themselves after max_staleness + 1 steps."""
    return staleness + 1 + max(2, staleness + 1) + staleness


def predict(recipe: OnlineRecipe, source: CostSource, workload: Workload) -> Prediction:
    """Simulate one recipe with `devices`."""
    simulation = simulate_recipe(recipe, source, workload, simulated_steps(recipe.pipeline.max_staleness))
    pace = simulation.steady()
    return Prediction(recipe, pace.step_seconds, pace.idle, source.memory(recipe, workload.facts))


def simulate_recipe(recipe: OnlineRecipe, source: CostSource, workload: Workload, steps: int) -> Simulation:
    """`steps` full steps of a recipe with `devices`; evaluations, which fill bubbles, are left out."""
    plan = plan_of(recipe, source, steps)
    assert recipe.devices is not None
    ranks = {group: max(1, int(count)) for group, count in recipe.devices.items()}
    return simulate(plan, source.costs(recipe), workload, ranks)


def plan_of(recipe: OnlineRecipe, source: CostSource, steps: int) -> RunPlan:
    assert recipe.devices is not None
    slots = {group: max(1, int(count)) // source.shards(recipe, group) for group, count in recipe.devices.items()}
    rollout = recipe.role_group("rollout")
    engines = max(1, int(recipe.devices[rollout])) // recipe.rollout.tensor_parallel_size
    plan = run_plan(recipe, [recipe.train.rollout_batch_size] * steps, slots, sleeping=source.sleeping(recipe))
    return replace(plan, engines=engines, evaluation=None, checkpoint_every=None)
