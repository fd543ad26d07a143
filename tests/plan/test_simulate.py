"""The simulator against hand-computed schedules, and what must hold of any."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.event_record import Place
from conveyor.pipeline.run_plan import RunPlan, ScorePart, TrainGroup
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import FixedDurations, Iterations
from conveyor.plan.lengths import Workload
from conveyor.plan.simulate import Simulation, _names, simulate
from conveyor.report.causes import idle_by_cause, idle_spells
from conveyor.report.timeline import devices
from conveyor.types import SampleId


def flow_shop(m: int, G: float, F: float, T: float, steps: int = 1, **changes) -> Simulation:
    """m equal micro-batches of one sample, made one after the other in G seconds, scored in F, trained in T."""
    plan = RunPlan(
        step_groups=(m,) * steps, samples_per_group=1, samples_per_update=m, micro_batch_size=1, engine_slots=1, **changes
    )  # fmt: skip
    seconds = {SampleId(group, 0): G / m for group in range(m * steps)}
    costs = TaskCosts(FixedDurations(seconds), {"reward": Linear(F / m)}, {"actor": TrainerCosts(Linear(T / m))})
    return simulate(plan, costs, Workload.draw("1", m * steps, 1))


@pytest.mark.parametrize(("G", "F", "T"), [(6, 1.5, 2.5), (2, 1.5, 6.5), (1, 7, 2), (3, 3, 3)])
@pytest.mark.parametrize("m", [1, 2, 10])
def test_one_step_is_the_flow_shop(m: int, G: float, F: float, T: float) -> None:
    step = (G + F + T) / m + (1 - 1 / m) * max(G, F, T)
    assert flow_shop(m, G, F, T).step_seconds == pytest.approx({1: step})


def test_without_overlap_stages_add_up() -> None:
    run = flow_shop(10, 6, 1.5, 2.5, steps=2, overlap=False)
    assert run.step_seconds == pytest.approx({1: 10, 2: 10})
    assert run.idle[2] == pytest.approx({"rollout": 0.4, "score": 0.85, "train": 0.75})


@pytest.mark.parametrize(("G", "F", "T"), [(6, 1.5, 2.5), (2, 1.5, 6.5), (1, 7, 2)])
@pytest.mark.parametrize("staleness", [1, 2])
def test_with_staleness_the_pace_is_the_slowest_stages(G: float, F: float, T: float, staleness: int) -> None:
    pace = flow_shop(10, G, F, T, steps=9, max_staleness=staleness).steady()
    assert pace.step_seconds == pytest.approx(max(G, F, T))
    assert min(pace.idle.values()) == pytest.approx(0, abs=1e-9)


def test_more_score_workers_share_micro_batches() -> None:
    assert flow_shop(10, 0.01, 20, 0.01).step_seconds[1] == pytest.approx(20, abs=0.02)
    assert flow_shop(10, 0.01, 20, 0.01, part_workers=(5,)).step_seconds[1] == pytest.approx(4, abs=0.02)


def test_merged_groups_take_turns() -> None:
    merged = {"parts": (ScorePart("train", ("reward",), False),), "rollout_group": "train"}
    run = flow_shop(4, 4, 2, 2, **merged)
    assert run.step_seconds == pytest.approx({1: 8})
    assert set(run.idle[1]) == {"train"}


def test_a_merged_group_that_sleeps_is_handed_over_three_times_a_step() -> None:
    """Asleep and awake again: engines 1 s, score workers 2, trainers 3; so a step has 2 · (1 + 2 + 3) s of moving."""
    plan = RunPlan(step_groups=(4, 4), samples_per_group=1, samples_per_update=4, micro_batch_size=1, engine_slots=1, rollout_group="train",
                   parts=(ScorePart("train", ("reward",), False),), sleeping=(("train", "train"),))  # fmt: skip
    seconds = {SampleId(group, 0): 1.0 for group in range(8)}
    costs = TaskCosts(FixedDurations(seconds), {"reward": Linear(0.5)}, {"actor": TrainerCosts(Linear(0.5))},
                      moves={"rollout": 1, "score": 2, "train": 3})  # fmt: skip
    run = simulate(plan, costs, Workload.draw("1", 8, 1))
    assert run.step_seconds == pytest.approx({1: 8 + 12 + 4, 2: 8 + 12})  # the first way to the engines is before step 1
    assert run.idle[2]["train"] == pytest.approx(12 / 20)
    causes = idle_by_cause(idle_spells(run.events, (0, 44)), (0, 44), devices(run.events))["train"]
    assert causes["moving"] == pytest.approx(28) and sum(causes.values()) == pytest.approx(28)


def test_weights_travel_before_the_next_step() -> None:
    """2 s of sampling, 1 of training, then update 3, publish 4, install 5; latency before each of the five tasks."""
    plan = RunPlan(step_groups=(1, 1), samples_per_group=1, samples_per_update=1, micro_batch_size=1)
    trainer = TrainerCosts(Linear(1), update=3, publish=4)
    seconds = {SampleId(group, 0): 2.0 for group in range(2)}
    costs = TaskCosts(FixedDurations(seconds), {"reward": Linear(0)}, {"actor": trainer}, engine_install=5, latency=0.1)
    run = simulate(plan, costs, Workload.draw("1", 2, 1))
    # rollout, score, prepare, train, update, publish, install. The first rollout's latency comes before the first window.
    assert run.step_seconds == pytest.approx({1: 2 + 1 + 3 + 4 + 5 + 6 * 0.1, 2: 2 + 1 + 3 + 4 + 5 + 7 * 0.1})
    assert [event.task for event in run.events if event.step == 2] == [
        "rollout",
        "score",
        "prepare",
        "train",
        "update",
        "publish",
        "install",
    ]


def test_prepare_does_not_wait_for_the_rank_that_trains() -> None:
    """The second micro-batch is scored at 2, while its ranks train the first until 11.5: the second follows at once."""
    plan = RunPlan(step_groups=(2,), samples_per_group=1, samples_per_update=2, micro_batch_size=1, engine_slots=1)
    seconds = {SampleId(0, 0): 1.0, SampleId(1, 0): 1.0}
    costs = TaskCosts(FixedDurations(seconds), {"reward": Linear(0)}, {"actor": TrainerCosts(Linear(10), prepare=Linear(0.5))})
    run = simulate(plan, costs, Workload.draw("1", 2, 1), {"train": 2})
    prepared = [(event.worker, event.start, event.end, event.samples) for event in run.events if event.task == "prepare"]
    assert prepared == [
        ("train 0", 1, 1.5, ((0, 0),)), ("train 1", 1, 1.5, ()), ("train 0", 2, 2.5, ((1, 0),)), ("train 1", 2, 2.5, ())
    ]  # fmt: skip
    assert run.step_seconds[1] == pytest.approx(21.5)


@st.composite
def plans(draw) -> RunPlan:
    n, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    updates = draw(st.integers(1, 2))
    place = draw(st.sampled_from([{}, {"score": "train"}, {"score": "train", "rollout": "train"}]))
    several = updates > 1
    parts = [ScorePart(place.get("score", "score"), ("reward",), False)]
    if several:
        parts.append(ScorePart(place.get("score", "score"), ("policy_snapshot",), True))
    workers = draw(st.integers(1, 3))
    judged = draw(st.booleans())
    if judged and draw(st.booleans()):
        parts = [part for part in parts if part.versioned]
    return RunPlan(
        step_groups=(groups * updates,) * draw(st.integers(1, 3)),
        samples_per_group=n,
        samples_per_update=groups * n,
        micro_batch_size=draw(st.integers(1, groups * n)),
        engines=draw(st.integers(1, 3)),
        engine_slots=draw(st.integers(n, 3 * n)),
        rollout_group=place.get("rollout", "rollout"),
        parts=tuple(parts),
        part_workers=tuple(workers for _ in parts),
        judged=judged,
        train_groups=(TrainGroup("train", ("actor",)),),
        overlap=draw(st.booleans()),
        max_staleness=draw(st.integers(0, 2)),
        in_flight_update=draw(st.booleans()),
        initial_sync=several,
    )


COSTS = TaskCosts(
    Iterations(constant=0.1, per_sample=0.03, per_prompt_token=0.01),
    {"reward": Linear(0.2, per_token=0.01), "policy_snapshot": Linear(0.1, per_sample=0.1)},
    {"actor": TrainerCosts(Linear(0.3, per_token=0.02), Linear(0.01), update=0.5, publish=0.2)},
    engine_install=0.3,
    snapshot_install=0.1,
    latency=0.01,
    judging=(0.0, 0.4, 3.0),
)


@settings(max_examples=100, deadline=None)
@given(plan=plans(), seed=st.integers(0, 1000), ranks=st.integers(1, 2))
def test_nothing_is_lost_and_no_device_does_two_things_at_once(plan: RunPlan, seed: int, ranks: int) -> None:
    groups = sum(plan.step_groups)
    workload = Workload.draw("uniform:low=1,high=30", groups, plan.samples_per_group, prompt=3, seed=seed)
    run = simulate(plan, COSTS, workload, {"train": ranks})
    expected = {(group, sample): 1 for group in range(groups) for sample in range(plan.samples_per_group)}
    for task in ("rollout", "prepare", *(["judge"] if plan.judged else [])):
        assert Counter(sample for event in run.events if event.task == task for sample in event.samples) == expected
    trained = Counter((event.step, event.micro_batch, event.worker) for event in run.events if event.task == "train")
    assert set(trained.values()) == {1}
    assert len(trained) == ranks * len(plan.step_groups) * (-(-plan.samples_per_update // plan.micro_batch_size)) * (
        plan.step_groups[0] * plan.samples_per_group // plan.samples_per_update
    )
    for window, shares in zip(run.windows.values(), run.idle.values(), strict=True):
        assert window[0] < window[1]
        assert all(-1e-9 <= share <= 1 for share in shares.values())
    _assert_exclusive(run)


def _assert_exclusive(run: Simulation) -> None:
    """Tasks of a worker come one after the other (but samples of an engine, and prepare), stages of a device group too (but prepare)."""
    for worker in {event.worker for event in run.events}:
        own = sorted((e.start, e.end) for e in run.events if e.worker == worker and e.task not in ("rollout", "prepare", "judge"))
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(own))
    kind = {"rollout": "rollout", "score": "score"}
    for group in {event.group for event in run.events}:
        own = [e for e in run.events if e.group == group and e.task not in ("prepare", "judge")]
        busy = [(e.start, e.end, kind.get(e.worker.split()[0], "train")) for e in own]
        for start, end, stage in busy:
            assert not any(other != stage and start < later - 1e-9 and earlier + 1e-9 < end for earlier, later, other in busy)


def test_workers_and_devices_have_the_names_of_a_run() -> None:
    for stage, group in (("train", "train"), ("score", "train"), ("rollout", "gpus")):
        worker = Place(stage, group, 3)
        assert _names(stage, group, 3) == (worker.name, worker.device)


def test_a_seed_gives_the_same_events() -> None:
    plan = RunPlan(step_groups=(4, 4), samples_per_group=2, samples_per_update=8, micro_batch_size=2, engines=2, max_staleness=1)
    runs = [simulate(plan, COSTS, Workload.draw("lognormal:mean=20,sigma=1", 8, 2, seed=3)).events for _ in range(2)]
    assert runs[0] == runs[1]
