"""The search for a placement: which devices, how many, and the sizes that go with them.

    every split × tensor parallel size × micro-batch × concurrency ─▶ memory fits? ─▶ estimate ─▶ simulate the best dozens

The estimate is a formula (`StageSeconds`) and only orders candidates; what is printed comes from simulations. Everything is a
function of its arguments: the same search gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conveyor.config import OnlineRecipe, UserError
from conveyor.plan.candidates import candidates, with_keys
from conveyor.plan.estimate import StageSeconds, stage_seconds
from conveyor.plan.lengths import Workload
from conveyor.plan.predict import CostSource, Prediction, predict, simulated_steps

MOST_SIMULATED = 32
FEWEST_SIMULATED = 4
SAMPLES_SIMULATED = 160_000
"""By all simulations of a search together, so that it ends in about a minute whatever a step's size."""
MOST_STALENESS = 4


@dataclass(frozen=True)
class Found:
    """What a search found, best first."""

    best: list[Prediction]
    """Within the recipe's own `pipeline.max_staleness`."""
    staler: dict[int, Prediction]
    """max_staleness → the best with it, for values above the recipe's own, up to `MOST_STALENESS`: for as many as time allows."""
    candidates: int
    fitting: int
    simulated: int


def search(
    recipe: OnlineRecipe, source: CostSource, workload: Workload, devices: int, tensor_parallel: Sequence[int] = (1,), shown: int = 5
) -> Found:
    """The best placements of a recipe's roles on `devices`.

    Args:
        workload: of at least `simulated_steps` of the highest staleness looked at, `MOST_STALENESS` or the recipe's own.
        tensor_parallel: sizes to try.

    Raises:
        UserError: nothing fits.
    """
    allowed = recipe.pipeline.max_staleness
    total, found, smallest = 0, [], None
    for candidate in candidates(recipe, source, workload.facts, devices, tensor_parallel):
        total += 1
        tables = source.memory(candidate, workload.facts)
        if all(table.fits for table in tables):
            found.append(candidate)
        else:
            short = max(table.total / table.limit for table in tables)
            smallest = short if smallest is None else min(smallest, short)
    if not found:
        raise UserError(_nothing_fits(devices, total, smallest))
    estimates = [stage_seconds(candidate, source, workload) for candidate in found]
    ranked = _Ranked(found, estimates, source, workload)
    best = ranked.best(allowed, SAMPLES_SIMULATED * 2 // 3, MOST_SIMULATED, at_least=FEWEST_SIMULATED)
    staler, budget = {}, SAMPLES_SIMULATED // 3
    for staleness in range(allowed + 1, MOST_STALENESS + 1):
        if predictions := ranked.best(staleness, budget, FEWEST_SIMULATED):
            staler[staleness] = predictions[0]
            budget -= len(predictions) * ranked.samples(staleness)
    return Found(_distinct(best)[:shown], staler, total, len(found), ranked.simulated)


@dataclass
class _Ranked:
    """Recipes that fit, in the order in which they are worth simulating."""

    recipes: Sequence[OnlineRecipe]
    estimates: Sequence[StageSeconds]
    source: CostSource
    workload: Workload
    simulated: int = 0

    def samples(self, staleness: int) -> int:
        """Of one simulation."""
        return self.recipes[0].samples_per_step * simulated_steps(staleness)

    def best(self, staleness: int, budget: int, most: int, at_least: int = 0) -> list[Prediction]:
        """Predictions at a staleness, best first: as many as the budget of samples allows."""
        order = sorted(range(len(self.recipes)), key=lambda number: self.estimates[number].step(staleness))
        count = max(at_least, min(most, budget // self.samples(staleness)))
        recipes = [with_keys(self.recipes[number], pipeline={"max_staleness": staleness}) for number in order[:count]]
        self.simulated += len(recipes)
        return sorted((predict(recipe, self.source, self.workload) for recipe in recipes), key=lambda found: found.step_seconds)


def _nothing_fits(devices: int, total: int, smallest: float | None) -> str:
    if smallest is None:
        return f"--gpus {devices}: no placement of the recipe's roles, steps and updates is possible on so many devices"
    return (
        f"--gpus {devices}: none of {total} placements fits; the nearest needs {smallest:.1f} × the memory of a GPU. More GPUs, "
        "train.zero_stage 3, train.offload_optimizer, model.dtype bfloat16, model.gradient_checkpointing or shorter responses would help"
    )


def _distinct(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The best of each split and tensor parallel size."""
    seen: dict[tuple[Any, ...], Prediction] = {}
    for prediction in predictions:
        recipe = prediction.recipe
        seen.setdefault((*sorted((recipe.devices or {}).items()), recipe.rollout.tensor_parallel_size), prediction)
    return list(seen.values())
