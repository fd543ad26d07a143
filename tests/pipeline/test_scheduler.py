"""Invariants of the scheduler under any plan and any order of events."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.actions import (
    Admit,
    Checkpoint,
    CloseEvaluation,
    Done,
    Evaluate,
    EvaluationSampled,
    InstallEngine,
    InstallSnapshot,
    Prepare,
    Publish,
    SampleFinished,
    Score,
    ScoreEvaluation,
    Train,
    Update,
)
from conveyor.pipeline.run_plan import EvaluationPlan, RunPlan, ScorePart, TrainGroup
from conveyor.pipeline.scheduler import Scheduler
from conveyor.types import SampleId


class World:
    """Carries actions out in an order that `choose` picks, and checks what must hold at every moment."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan)
        self.pending: list[object] = []  # events that could happen next
        self.log: list[object] = []
        first = plan.start_step - 1 if plan.initial_sync else plan.start_step
        self.engine_version = [first] * plan.engines
        self.engine_load = [0] * plan.engines
        self.snapshots: dict[tuple[int, int], int] = {}
        self.sampled: dict[SampleId, int] = {}
        self.trained: Counter[tuple[int, int, SampleId]] = Counter()
        self.weights = [plan.start_step * 1000] * len(plan.train_groups)  # changes with every update
        self.stage_on: dict[str, Counter[str]] = {}
        self.evaluated: Counter[tuple[int, int]] = Counter()  # (version, prompt) → samples scored by every reward part
        self.closed: list[int] = []
        self.held_out = [0] * plan.engines
        self.saved: tuple[int, tuple[int, ...], int] | None = None  # of the newest checkpoint: step, groups carried, next group

    def run(self, choose, killed_after: int | None = None) -> None:
        """`killed_after`: so many events, if the run has not ended by then."""
        self._take(self.scheduler.actions())
        while not self.scheduler.finished:
            if killed_after is not None and killed_after <= 0 and self.saved is not None:
                return
            killed_after = None if killed_after is None else killed_after - 1
            assert self.pending, "deadlock: nothing is running and the run is not finished"
            event = self.pending.pop(choose(len(self.pending)))
            self._happen(event)
            self.scheduler.handle(event)
            self._take(self.scheduler.actions())
        assert not self.pending
        assert self.scheduler.actions() == []

    def _take(self, actions) -> None:
        for action in actions:
            self.log.append(action)
            self._occupy(action, +1)
            match action:
                case Admit(engine, group, step):
                    if self.plan.order == "prompt":
                        assert 0 <= step - self.engine_version[engine] <= self.plan.max_staleness
                    self.engine_load[engine] += self.plan.samples_per_group
                    assert self.engine_load[engine] + self.held_out[engine] <= self.plan.engine_slots
                    for sample in range(self.plan.samples_per_group):
                        self.pending.append(SampleFinished(engine, SampleId(group, sample), self.engine_version[engine]))
                    continue
                case Evaluate(engine, prompt, version):
                    facts = self.plan.evaluation
                    assert version == self.engine_version[engine]
                    assert not facts.in_bubbles or self.engine_load[engine] == 0, "only idle engines evaluate"
                    self.pending += [EvaluationSampled(engine, prompt, version, False) for _ in range(facts.samples_per_prompt)]
                    self.held_out[engine] += facts.samples_per_prompt
                    assert self.engine_load[engine] + self.held_out[engine] <= self.plan.engine_slots
                    continue
                case InstallEngine(engine, _):
                    if not self.plan.in_flight_update:
                        assert self.engine_load[engine] == 0
                    self._abort_evaluations(engine)
                case Score(part, worker, key, _):
                    if self.plan.parts[part].versioned:
                        assert self.snapshots.get((part, worker), self.plan.start_step) == key.step
                case Train(number, key, samples, update, _):
                    assert all(0 <= key.step - self.sampled[sample] <= self.plan.max_staleness for sample in samples)
                    assert self.weights[number] % 1000 == update and self.weights[number] // 1000 == key.step
            self.pending.append(Done(action))

    def _abort_evaluations(self, engine: int) -> None:
        for place, event in enumerate(self.pending):
            if isinstance(event, EvaluationSampled) and event.engine == engine:
                assert self.plan.evaluation.in_bubbles, "only evaluations in bubbles give way"
                self.pending[place] = EvaluationSampled(engine, event.prompt, event.version, True)

    def _happen(self, event) -> None:
        match event:
            case SampleFinished(engine, sample, version):
                self.engine_load[engine] -= 1
                self.sampled[sample] = version
            case EvaluationSampled(engine, _, version, _):
                self.held_out[engine] -= version == self.engine_version[engine]
            case Done(InstallEngine(engine, version)):
                self.engine_version[engine], self.held_out[engine] = version, 0
            case Done(Checkpoint(0, step)):
                self.saved = (step, *self.scheduler.membership.untrained(step))
            case Done(InstallSnapshot(part, worker, version)):
                self.snapshots[part, worker] = version
            case Done(ScoreEvaluation(_, _, version, prompts)):
                self.evaluated.update((version, prompt) for prompt in prompts)
            case Done(CloseEvaluation(version)):
                self.closed.append(version)
            case Done(Train(number, _, samples, update, _)):
                for sample in samples:
                    self.trained[number, update, sample] += 1
            case Done(Update(number, _, _, _)):
                self.weights[number] += 1
            case Done(Publish(number, version)):
                self.weights[number] = version * 1000
        if isinstance(event, Done):
            self._occupy(event.action, -1)

    def _occupy(self, action, change: int) -> None:
        """Only one stage at a time on a resource (samples occupy until their group is done: checked by load)."""
        if isinstance(action, (Admit, InstallEngine, Prepare, Evaluate, CloseEvaluation)):
            return
        group = (
            self.plan.parts[action.part].group
            if isinstance(action, (Score, InstallSnapshot, ScoreEvaluation))
            else self.plan.train_groups[action.train_group].group
        )
        stages = self.stage_on.setdefault(self.plan.resource(group), Counter())
        stages["score" if isinstance(action, (Score, InstallSnapshot, ScoreEvaluation)) else "train"] += change
        assert sum(count > 0 for count in stages.values()) <= 1
        if self.plan.resource(group) == self.plan.resource(self.plan.rollout_group) and change > 0:
            assert not any(self.engine_load), "engines are sampling on the same group"


@st.composite
def plans(draw) -> RunPlan:
    n = draw(st.sampled_from([1, 2, 3]))
    groups_per_update = draw(st.integers(1, 3))
    updates = draw(st.integers(1, 3))
    whole = groups_per_update * updates
    steps = draw(st.lists(st.sampled_from([whole, whole, max(1, whole - 1)]), min_size=1, max_size=4))
    parts, workers = [ScorePart("score", ("reward",), False, ("reward",))], [draw(st.integers(1, 2))]
    several = updates > 1 or draw(st.booleans())
    staleness = draw(st.integers(0, 2))
    if several:
        parts.append(ScorePart("score", ("policy_snapshot",), True))
        workers.append(workers[0])
    if draw(st.booleans()):
        parts.append(ScorePart("other", ("judge",), False, ("judge",)))
        workers.append(1)
    merged = draw(st.sampled_from(["apart", "score+train", "all"]))
    name = {"apart": {}, "score+train": {"score": "train"}, "all": {"score": "train", "rollout": "train"}}[merged]
    parts = [ScorePart(name.get(part.group, part.group), part.roles, part.versioned, part.rewards) for part in parts]
    apart = draw(st.booleans()) and several
    return RunPlan(
        step_groups=tuple(steps),
        samples_per_group=n,
        samples_per_update=groups_per_update * n,
        micro_batch_size=draw(st.integers(1, groups_per_update * n)),
        update_epochs=draw(st.integers(1, 2)) if several else 1,
        engines=draw(st.integers(1, 2)),
        engine_slots=draw(st.integers(n, 4 * n)),
        rollout_group=name.get("rollout", "rollout"),
        parts=tuple(parts),
        part_workers=tuple(workers),
        train_groups=(TrainGroup("train", ("actor",)), TrainGroup("critic", ("critic",))) if apart else (TrainGroup("train", ("actor",)),),
        overlap=draw(st.booleans()),
        max_staleness=staleness,
        order=draw(st.sampled_from(["prompt", "completion"])),
        in_flight_update=draw(st.booleans()),
        waits_for_group=n > 1 and draw(st.booleans()),
        waits_for_update=several and draw(st.booleans()),
        start_step=draw(st.integers(0, len(steps) - 1)),
        initial_sync=several,
        checkpoint_every=draw(st.sampled_from([None, 1, 2])),
        evaluation=draw(evaluations(n, in_bubbles=merged != "all")),
    )


@st.composite
def evaluations(draw, n: int, in_bubbles: bool) -> EvaluationPlan | None:
    bubbles = in_bubbles and draw(st.booleans())
    plan = EvaluationPlan(draw(st.integers(1, 3)), draw(st.integers(1, n)), draw(st.integers(1, 2)), bubbles)
    return draw(st.sampled_from([None, plan]))


@settings(max_examples=80, deadline=None)
@given(plan=plans(), data=st.data())
def test_every_sample_is_trained_once_a_pass_within_the_staleness_bound(plan: RunPlan, data) -> None:
    world = World(plan)
    world.run(lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0)
    first = sum(plan.step_groups[: plan.start_step])
    expected = {SampleId(group, k) for group in range(first, sum(plan.step_groups)) for k in range(plan.samples_per_group)}
    for number in range(len(plan.train_groups)):
        seen = Counter(sample for (line, _, sample), count in world.trained.items() if line == number for _ in range(count))
        assert set(seen) == expected
        assert set(seen.values()) == {plan.update_epochs}
    if plan.evaluation is not None:
        check_evaluations(world)


def check_evaluations(world: World) -> None:
    """Every version that is due is closed once; the last is complete, and all are that do not give way."""
    plan, facts, last = world.plan, world.plan.evaluation, len(world.plan.step_groups)
    due = [version for version in range(plan.start_step, last + 1) if version % facts.every == 0 or version == last]
    assert sorted(world.closed) == due
    parts = sum(bool(part.rewards) for part in plan.parts)
    assert set(world.evaluated.values()) <= {parts}
    complete = [version for version in due if all(world.evaluated[version, prompt] for prompt in range(facts.prompts))]
    assert last in complete
    if not facts.in_bubbles and plan.max_staleness == 0:
        assert complete == due


@settings(max_examples=60, deadline=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30), lives=st.lists(st.integers(1, 60), max_size=3))
def test_a_run_killed_again_and_again_trains_every_group_once(plan: RunPlan, seed: int, lives: list[int]) -> None:
    """Each life goes on from the last checkpoint: its steps count, what came after them does not."""
    import random
    from dataclasses import replace

    rng = random.Random(seed)
    plan = replace(plan, checkpoint_every=1, train_groups=plan.train_groups[:1], start_step=0, initial_sync=True, evaluation=None)
    trained: Counter[int] = Counter()
    for killed_after in [*lives, None]:
        world = World(plan)
        world.run(rng.randrange, killed_after)
        end = len(plan.step_groups) if killed_after is None or world.scheduler.finished else world.saved[0]
        steps = {
            action.key: action
            for action in world.log
            if isinstance(action, Train) and action.key.step < end and action.update == action.key.update
        }
        trained.update({sample.group for action in steps.values() for sample in action.samples})
        if end == len(plan.step_groups):
            break
        plan = replace(plan, start_step=end, carried=world.saved[1], next_group=world.saved[2])
    assert trained == Counter(range(sum(plan.step_groups)))


@pytest.mark.parametrize("in_bubbles", [True, False])
def test_a_version_on_its_way_into_an_engine_is_still_evaluated(in_bubbles: bool) -> None:
    """Versions 1 and 2 are published while the only engine takes version 1: its round is not over yet."""
    plan = RunPlan(step_groups=(1, 1, 1, 1), samples_per_group=1, samples_per_update=1, micro_batch_size=1, engine_slots=4, max_staleness=2,
                   parts=(ScorePart("score", ("reward",), False, ("reward",)),),
                   evaluation=EvaluationPlan(1, 1, 1, in_bubbles))  # fmt: skip
    scheduler = Scheduler(plan)
    log, waiting, todo = [], [], scheduler.actions()
    while todo:
        action = todo.pop(0)
        log.append(action)
        if isinstance(action, InstallEngine):
            waiting.append(action)
            continue
        event = Done(action)
        if isinstance(action, Admit):
            event = SampleFinished(0, SampleId(action.group, 0), 0)
        if isinstance(action, Evaluate):
            event = EvaluationSampled(0, action.prompt, action.version, False)
        scheduler.handle(event)
        todo += scheduler.actions()
    assert scheduler.version >= 2 and waiting == [InstallEngine(0, 1)]
    closed = [action.version for action in log if isinstance(action, CloseEvaluation)]
    assert 0 in closed and 1 not in closed, "a version that the engine will skip is closed, one on its way is not"
    scheduler.handle(Done(waiting[0]))
    due = scheduler.actions()
    assert InstallEngine(0, scheduler.version) in due if in_bubbles else Evaluate(0, 0, 1) in due


@settings(max_examples=30, deadline=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30))
def test_the_same_events_give_the_same_actions(plan: RunPlan, seed: int) -> None:
    import random

    logs = []
    for _ in range(2):
        world, rng = World(plan), random.Random(seed)
        world.run(rng.randrange)
        logs.append(world.log)
    assert logs[0] == logs[1]


@settings(max_examples=60, deadline=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30))
def test_evaluation_in_bubbles_changes_nothing_else(plan: RunPlan, seed: int) -> None:
    """The same events of the training give the same actions of the training at the same moments, with and without it."""
    import random
    from dataclasses import replace

    parts = tuple(replace(part, group="other" if part.group == "other" else "score") for part in plan.parts)
    plan = replace(plan, parts=parts, evaluation=EvaluationPlan(3, 1, 1, True), overlap=True, max_staleness=0,
                   rollout_group="rollout")  # fmt: skip
    world, rng, plain = World(plan), random.Random(seed), Scheduler(replace(plan, evaluation=None))
    plain.actions()
    world._take(world.scheduler.actions())
    while not world.scheduler.finished:
        # A micro-batch of evaluation that is being scored cannot give way: it is over at once here.
        quick = [i for i, event in enumerate(world.pending) if isinstance(event, Done) and isinstance(event.action, ScoreEvaluation)]
        event = world.pending.pop(quick[0] if quick else rng.randrange(len(world.pending)))
        world._happen(event)
        world.scheduler.handle(event)
        actions = world.scheduler.actions()
        world._take(actions)
        extra = (Evaluate, ScoreEvaluation, CloseEvaluation)
        if isinstance(event, EvaluationSampled) or (isinstance(event, Done) and isinstance(event.action, extra)):
            assert all(isinstance(action, extra) for action in actions)
            continue
        plain.handle(event)
        assert [action for action in actions if not isinstance(action, extra)] == plain.actions()


def _train_order(plan: RunPlan, seed: int) -> list[tuple[SampleId, ...]]:
    import random

    world = World(plan)
    world.run(random.Random(seed).randrange)
    return [action.samples for action in world.log if isinstance(action, Train)]


@pytest.mark.parametrize("overlap", [True, False])
def test_prompt_order_trains_the_same_micro_batches_whatever_arrives_first(overlap: bool) -> None:
    plan = RunPlan(step_groups=(4, 4, 3), samples_per_group=2, samples_per_update=4, micro_batch_size=3, overlap=overlap,
                   parts=(ScorePart("score", ("r",), True),), initial_sync=True)  # fmt: skip
    orders = {tuple(_train_order(plan, seed)) for seed in range(10)}
    assert len(orders) == 1
    assert [len(samples) for samples in orders.pop()] == [3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 2]


def test_completion_order_keeps_the_samples_of_an_update() -> None:
    plan = RunPlan(step_groups=(4,), samples_per_group=2, samples_per_update=4, micro_batch_size=2, order="completion",
                   parts=(ScorePart("score", ("r",), True),), initial_sync=True)  # fmt: skip
    for seed in range(20):
        order = _train_order(plan, seed)
        assert {s for samples in order[:2] for s in samples} == {SampleId(g, k) for g in (0, 1) for k in (0, 1)}
        assert {s for samples in order[2:] for s in samples} == {SampleId(g, k) for g in (2, 3) for k in (0, 1)}


def test_overlap_trains_before_the_last_sample_is_in_and_no_overlap_never() -> None:
    for overlap in (True, False):
        plan = RunPlan(step_groups=(4,), samples_per_group=1, samples_per_update=4, micro_batch_size=1, overlap=overlap)
        world = World(plan)
        # First come, first done, but the last sample is held back as long as anything else can happen.
        world.run(lambda n, w=world: next((i for i in range(n) if not _is_last(w.pending[i])), 0))
        assert sum(isinstance(action, Train) for action in world.log) == 4
        assert _trained_before_last(world) == (3 if overlap else 0)


def _is_last(event: object) -> bool:
    return isinstance(event, SampleFinished) and event.id.group == 3


def _trained_before_last(world: World) -> int:
    score_of_last = next(i for i, a in enumerate(world.log) if isinstance(a, Score) and SampleId(3, 0) in a.samples)
    return sum(isinstance(action, Train) for action in world.log[:score_of_last])


def test_staleness_one_admits_the_next_step_before_this_one_is_trained() -> None:
    plan = RunPlan(step_groups=(2, 2, 2), samples_per_group=1, samples_per_update=2, micro_batch_size=2, max_staleness=1, engine_slots=8)
    admitted = [action.group for action in Scheduler(plan).actions() if isinstance(action, Admit)]
    assert admitted == [0, 1, 2, 3]


def test_on_policy_admits_only_its_own_step() -> None:
    plan = RunPlan(step_groups=(2, 2), samples_per_group=1, samples_per_update=2, micro_batch_size=2, engine_slots=8)
    assert [action.group for action in Scheduler(plan).actions() if isinstance(action, Admit)] == [0, 1]


def _carry_out(scheduler: Scheduler, actions: list) -> list:
    """Everything but sampling and installs into engines, to the end → those."""
    left = []
    while actions:
        action = actions.pop(0)
        if isinstance(action, (Admit, InstallEngine)):
            left.append(action)
        else:
            scheduler.handle(Done(action))
            actions += scheduler.actions()
    return left


@pytest.mark.parametrize("in_flight", [True, False])
def test_an_engine_drains_before_an_install_unless_updates_are_in_flight(in_flight: bool) -> None:
    plan = RunPlan(step_groups=(2, 4), samples_per_group=1, samples_per_update=2, micro_batch_size=2, max_staleness=1, engine_slots=2,
                   in_flight_update=in_flight)  # fmt: skip
    scheduler = Scheduler(plan)

    def after(event: Done | SampleFinished) -> list:
        scheduler.handle(event)
        return _carry_out(scheduler, scheduler.actions())

    assert _carry_out(scheduler, scheduler.actions()) == [Admit(0, 0, 0), Admit(0, 1, 0)]
    assert after(SampleFinished(0, SampleId(0, 0), 0)) == [Admit(0, 2, 1)]
    # The sample of group 1 completes step 0, which is trained and published while group 2, the slow one, is sampled.
    first = after(SampleFinished(0, SampleId(1, 0), 0))
    assert scheduler.version == 1
    if in_flight:
        assert first == [Admit(0, 3, 1), InstallEngine(0, 1)]
        assert after(SampleFinished(0, SampleId(3, 0), 0)) == [], "nothing is admitted while the install runs"
        assert after(Done(InstallEngine(0, 1))) == [Admit(0, 4, 1)]
        return
    assert first == [Admit(0, 3, 1)], "the engine holds groups of the old version"
    # A slot is free and group 4 is fresh enough, but admitting it would put the install off for ever.
    assert after(SampleFinished(0, SampleId(3, 0), 0)) == []
    assert after(SampleFinished(0, SampleId(2, 0), 0)) == [InstallEngine(0, 1)]
    assert scheduler.actions() == [], "nothing is admitted while the install runs"
    assert after(Done(InstallEngine(0, 1))) == [Admit(0, 4, 1), Admit(0, 5, 1)]


def test_a_sample_from_the_wrong_engine_or_too_stale_is_refused() -> None:
    plan = RunPlan(step_groups=(2, 2), samples_per_group=1, samples_per_update=2, micro_batch_size=2, engines=2, engine_slots=1)
    scheduler = Scheduler(plan)
    scheduler.actions()
    with pytest.raises(AssertionError, match="does not hold"):
        scheduler.handle(SampleFinished(1, SampleId(0, 0), 0))
    with pytest.raises(AssertionError, match="staleness"):
        scheduler.handle(SampleFinished(0, SampleId(0, 0), -1))


def test_two_thousand_micro_batches_a_second() -> None:
    """Well above it on any machine: guards against scans that grow with the step."""
    import time

    plan = RunPlan(step_groups=(2000,), samples_per_group=1, samples_per_update=2000, micro_batch_size=1, engine_slots=64)
    world = World(plan)
    started = time.perf_counter()
    world.run(lambda n: 0)
    assert time.perf_counter() - started < 10
