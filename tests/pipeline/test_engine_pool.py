"""Engines give what they have, when they have it."""

import pytest

from conveyor.pipeline.run_plan import RunPlan
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import Iterations
from conveyor.plan.lengths import Workload
from conveyor.plan.simulate import simulate


@pytest.mark.parametrize(("groups", "size", "engines", "slots"), [(6, 6, 3, 1), (5, 4, 3, 2), (6, 5, 4, 3)])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_micro_batch_may_be_larger_than_what_any_engine_has(groups: int, size: int, engines: int, slots: int, staleness: int) -> None:
    """An engine that is waited for until it has a whole micro-batch, which lies on several engines, is waited for forever."""
    plan = RunPlan(step_groups=(groups,) * 3, samples_per_group=1, samples_per_update=groups, micro_batch_size=size, engines=engines,
                   engine_slots=slots, max_staleness=staleness)  # fmt: skip
    costs = TaskCosts(Iterations(constant=1.0), {"reward": Linear(1)}, {"actor": TrainerCosts(Linear(1))})
    run = simulate(plan, costs, Workload.draw("uniform:low=1,high=9", 3 * groups, 1))
    makers = {event.samples[0]: event.worker for event in run.events if event.task == "rollout"}
    prepared = [event.samples for event in run.events if event.task == "prepare"]
    assert all(len({makers[sample] for sample in samples}) > 1 for samples in prepared if len(samples) > slots)
    assert sum(len(samples) > slots for samples in prepared) >= 3
    assert sorted(sample for samples in prepared for sample in samples) == [(group, 0) for group in range(3 * groups)]
