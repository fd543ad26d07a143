"""Rewards that are functions or urls, and dynamic sampling, on the simulator's clock: schedules worked out by hand."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.run_plan import RunPlan, ScorePart
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import FixedDurations
from conveyor.plan.lengths import Size, Workload, drawn_for
from conveyor.plan.simulate import Simulation, simulate
from conveyor.report.causes import idle_by_cause, idle_spells
from conveyor.report.timeline import devices
from conveyor.types import SampleId

STEP = 4
"""Groups of one sample."""


def judged(judge: float, steps: int = 1, equal: float | frozenset[int] = 0.0, **changes) -> Simulation:
    """Samples of a second, one after the other; judging takes `judge` seconds, training a micro-batch of one sample 0.1."""
    facts = {
        "step_groups": (STEP,) * steps, "samples_per_group": 1, "samples_per_update": STEP, "micro_batch_size": 1, "engine_slots": 1,
        "parts": (), "part_workers": (), "judged": True,
    }  # fmt: skip
    plan = RunPlan(**(facts | changes))
    seconds = {SampleId(group, 0): 1.0 for group in range(4 * STEP * steps)}
    costs = TaskCosts(
        FixedDurations(seconds),
        {"r": Linear(0.5), "reference": Linear(0.2)},
        {"actor": TrainerCosts(Linear(0.1))},
        reference_install=0.25,
        judging=(judge,),
    )
    return simulate(plan, costs, Workload(np.ones((STEP * steps, 1), dtype=np.int64), np.ones(STEP * steps, dtype=np.int64), equal))


def causes(run: Simulation, step: int) -> dict[str, dict[str, float]]:
    window = run.windows[step]
    found = idle_by_cause(idle_spells(run.events, window), window, devices(run.events))
    return {group: {cause: seconds for cause, seconds in of.items() if seconds > 1e-9} for group, of in found.items()}


def of_steps(run: Simulation, task: str) -> dict[int, list[int]]:
    """Step → groups."""
    found: dict[int, list[int]] = defaultdict(list)
    for event in run.events:
        if event.task == task:
            found[event.step] += [group for group, _ in event.samples]
    return {step: sorted(groups) for step, groups in sorted(found.items())}


def test_samples_are_judged_while_others_are_sampled() -> None:
    """The last sample leaves its engine at 4, is judged until 7 and trained until 7.1; the first was judged from 1 to 4."""
    run = judged(3.0)
    assert [(e.start, e.end) for e in run.events if e.task == "judge"] == [(1, 4), (2, 5), (3, 6), (4, 7)]
    assert run.step_seconds == pytest.approx({1: 7.1})
    assert set(run.idle[1]) == {"rollout", "train"}, "functions and urls are no device"
    # The trainer waits for 0 (sampled until 1, judged until 4), then 0.9 s each for the judging of the others.
    assert causes(run, 1)["train"] == pytest.approx({"waiting for rollout": 1, "waiting for reward": 3 + 3 * 0.9})
    assert causes(run, 1)["rollout"] == pytest.approx({"waiting for reward": 3, "waiting for train": 0.1})


def test_with_staleness_a_slow_judge_stops_no_engine() -> None:
    assert judged(3.0, 8).steady().step_seconds == pytest.approx(7.1)
    ahead = judged(3.0, 8, max_staleness=1).steady()
    assert ahead.step_seconds == pytest.approx(4)
    assert ahead.idle["rollout"] == pytest.approx(0, abs=1e-9)


def test_without_overlap_judging_takes_its_turn() -> None:
    run = judged(3.0, 2, overlap=False)
    assert run.step_seconds == pytest.approx({1: 7.4, 2: 7.4})
    # All are sampled by 4, judged by 7, trained by 7.4.
    assert causes(run, 2)["train"] == pytest.approx({"waiting for rollout": 1, "turns": 3, "waiting for reward": 3})


def test_a_micro_batch_waits_for_models_and_judging() -> None:
    parts = {"parts": (ScorePart("score", ("r",), False),), "part_workers": (1,)}
    for judge, prepared in ((0.2, [1.5, 2.5, 3.5, 4.5]), (3.0, [4, 5, 6, 7])):
        run = judged(judge, **parts)
        assert [e.start for e in run.events if e.task == "prepare"] == pytest.approx(prepared)


def test_groups_with_equal_rewards_are_replaced() -> None:
    """Steps are made of the groups that stay, in prompt order; groups beyond the prompts of the steps are sampled too."""
    run = judged(0.5, 2, equal=frozenset({1, 2, 5}), groups_sampled_at_most=8)
    # The workload has eight groups: 9 is 1 again, and 10 is 2.
    assert of_steps(run, "rollout") == of_steps(run, "judge") == {1: [0, 1, 2, 3, 4, 5, 6], 2: [7, 8, 9, 10, 11, 12]}
    assert of_steps(run, "prepare") == {1: [0, 3, 4, 6], 2: [7, 8, 11, 12]}


def test_a_step_samples_no_more_groups_than_the_limit() -> None:
    run = judged(0.5, 2, equal=1.0, groups_sampled_at_most=6)
    assert of_steps(run, "rollout") == {1: [0, 1, 2, 3, 4, 5], 2: [6, 7, 8, 9, 10, 11]}
    assert of_steps(run, "prepare") == {1: [2, 3, 4, 5], 2: [8, 9, 10, 11]}


def test_engines_that_wait_for_a_group_to_be_judged_wait_for_rewards() -> None:
    """Two groups at once; 1 is judged until 4, and only then it is known that another has to be sampled."""
    run = judged(3.0, equal=frozenset({1}), groups_sampled_at_most=4, step_groups=(2,), samples_per_update=2, engine_slots=2)
    assert [(e.task, e.start, e.end) for e in run.events if e.samples == ((2, 0),) and e.task != "prepare"] == [
        ("rollout", 4, 5), ("judge", 5, 8)
    ]  # fmt: skip
    assert causes(run, 1)["rollout"] == pytest.approx({"waiting for reward": 3 + 3, "waiting for train": 0.1})


def test_a_reference_that_is_refreshed_is_installed_as_snapshots_are() -> None:
    reference = ScorePart("score", ("reference",), False, refresh=2)
    run = judged(0.1, 4, parts=(reference,), part_workers=(2,))
    installs = [(e.worker, e.version) for e in run.events if e.task == "install" and e.role == "reference"]
    assert sorted(installs) == [(f"score {worker}", version) for worker in (0, 1) for version in (2, 4)]
    assert all(e.end - e.start == pytest.approx(0.25) for e in run.events if e.task == "install" and e.role == "reference")


def test_what_is_drawn_for_a_group_is_spread_evenly_and_always_the_same() -> None:
    drawn = [drawn_for(group) for group in range(4000)]
    assert drawn == [drawn_for(group) for group in range(4000)]
    assert np.histogram(drawn, bins=4, range=(0, 1))[0] == pytest.approx(1000, abs=100)
    workload = Workload.draw("9", 100, 2, prompt=3, equal=0.3)
    assert np.mean([workload.equal(group) for group in range(4000)]) == pytest.approx(workload.equal_share, abs=0.03)
    assert workload.at(103, 1) == Size(3, 9)


@settings(max_examples=40, deadline=None)
@given(
    equal=st.frozensets(st.integers(0, 3 * STEP - 1)),
    limit=st.integers(STEP, 3 * STEP),
    judge=st.sampled_from([0.0, 0.3, 5.0]),
    changes=st.fixed_dictionaries({
        "max_staleness": st.integers(0, 2), "overlap": st.booleans(), "order": st.sampled_from(["prompt", "completion"]),
        "engines": st.integers(1, 2), "engine_slots": st.integers(1, 5),
    }),
)  # fmt: skip
def test_every_step_is_filled_and_leaves_out_no_more_than_it_may(
    equal: frozenset[int], limit: int, judge: float, changes: dict[str, object]
) -> None:
    steps = 3
    run = judged(judge, steps, equal=equal, groups_sampled_at_most=limit, **changes)
    trained = of_steps(run, "prepare")
    assert [len(groups) for groups in trained.values()] == [STEP] * steps
    every = [group for groups in trained.values() for group in groups]
    assert len(set(every)) == len(every)
    sampled = of_steps(run, "rollout")
    dropped = {group for groups in sampled.values() for group in groups} - set(every)
    assert all(group % (steps * STEP) in equal for group in dropped)
    assert sum(map(len, sampled.values())) == len(every) + len(dropped) <= steps * limit
    if changes["max_staleness"] == 0:  # else some are dropped early, as groups of the step that is being filled then
        for step, groups in trained.items():
            stay = any(group % (steps * STEP) in equal for group in groups)
            assert len(sampled[step]) == limit or (len(sampled[step]) < limit and not stay), "equal groups stay at the limit only"
    for places in run.idle.values():
        assert set(places) == {"rollout", "train"}
