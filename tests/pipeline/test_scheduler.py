"""Invariants of the scheduler under any plan and any order of events."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.actions import (
    Admit,
    Checkpoint,
    CloseEvaluation,
    Done,
    Drop,
    Evaluate,
    EvaluationSampled,
    HandOver,
    InstallEngine,
    InstallSnapshot,
    Judge,
    Prepare,
    Publish,
    SampleFinished,
    SampleJudged,
    Score,
    ScoreEvaluation,
    Train,
    Update,
)
from conveyor.pipeline.run_plan import EvaluationPlan, RunPlan, ScorePart, TrainGroup
from conveyor.pipeline.scheduler import Scheduler
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey


class World:
    """Carries actions out in an order that `choose` picks, and checks what must hold at every moment."""

    def __init__(self, plan: RunPlan, equal: Callable[[int], bool] = lambda group: False) -> None:
        """`equal`: of dynamic sampling, whether a group's rewards are all equal."""
        self.plan, self.equal = plan, equal
        self.scheduler = Scheduler(plan)
        self.pending: list[object] = []  # events that could happen next
        self.log: list[object] = []
        first = plan.start_step - 1 if plan.initial_sync else plan.start_step
        self.engine_version = [first] * plan.engines
        self.engine_load = [0] * plan.engines
        self.snapshots = {
            (number, worker): plan.start_step if part.versioned else plan.start_step // part.refresh * part.refresh
            for number, part in enumerate(plan.parts)
            if part.versioned or part.refresh
            for worker in range(plan.part_workers[number])
        }
        self.judging: Counter[tuple[SampleId, int | None]] = Counter()
        self.judged: set[tuple[SampleId, int | None]] = set()
        self.scored: set[tuple[int, object]] = set()  # (part, micro-batch)
        self.dropped: list[int] = []
        self.groups: dict[int, set[int]] = {}  # step → groups that are trained in it
        self.sampled: dict[SampleId, int] = {}
        self.trained: Counter[tuple[int, int, SampleId]] = Counter()
        self.weights = [plan.start_step * 1000] * len(plan.train_groups)  # changes with every update
        self.stage_on: dict[str, Counter[str]] = {}
        self.evaluated: Counter[tuple[int, int]] = Counter()  # (version, prompt) → samples scored by every reward part
        self.closed: list[int] = []
        self.held_out = [0] * plan.engines
        self.awake: dict[str, str | None] = dict(plan.sleeping)  # None: handed over just now
        self.at_work: Counter[str] = Counter()  # device group → tasks, and samples in its engines
        self.saved: tuple[int, tuple[int, ...], int] | None = None  # of the newest checkpoint: step, groups carried, next group

    def run(self, choose, killed_after: int | None = None) -> None:
        """`killed_after`: so many events, if the run has not ended by then."""
        self._take(self.scheduler.actions())
        while not self.scheduler.finished:
            if killed_after is not None and killed_after <= 0 and self.saved is not None:
                return
            killed_after = None if killed_after is None else killed_after - 1
            assert self.pending, "deadlock: nothing is running and the run is not finished"
            self.scheduler.handle(self.happen(choose(len(self.pending))))
            self._take(self.scheduler.actions())
        assert not self.pending
        assert self.scheduler.actions() == []
        home = dict(self.plan.sleeping)
        moved = [group for group, stage in self.awake.items() if stage != home[group]]
        assert self.scheduler.awake.way_home() == [HandOver(group, self.awake[group], home[group]) for group in moved]

    def _take(self, actions) -> None:
        for action in actions:
            self.log.append(action)
            self._awake_for(action)
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
                case Judge(sample, version):
                    assert version is not None or sample in self.sampled, "judged before it is there"
                    self.judging[sample, version] += 1
                    assert self.judging[sample, version] == 1, "judged twice"
                    self.pending.append(SampleJudged(sample, version))
                    continue
                case Drop(group, step):
                    assert group not in self.dropped and self.equal(group) and self._all_judged(group)
                    assert step >= self.scheduler.version, "dropped of a step that is trained"
                    self.dropped.append(group)
                    continue
                case Score(part, worker, key, _):
                    if self.plan.parts[part].versioned:
                        assert self.snapshots[part, worker] == key.step
                    if refresh := self.plan.parts[part].refresh:
                        assert self.snapshots[part, worker] == key.step // refresh * refresh
                case Prepare(_, key, samples):
                    assert all((part, key) in self.scored for part in range(len(self.plan.parts)))
                    assert not self.plan.judged or all((sample, None) in self.judged for sample in samples)
                case Train(number, key, samples, update, _):
                    self.groups.setdefault(key.step, set()).update(sample.group for sample in samples)
                    assert not any(sample.group in self.dropped for sample in samples)
                    assert all(0 <= key.step - self.sampled[sample] <= self.plan.max_staleness for sample in samples)
                    assert self.weights[number] % 1000 == update and self.weights[number] // 1000 == key.step
            self.pending.append(Done(action))

    def _awake_for(self, action) -> None:
        """Nobody works asleep, and a group is handed over when nothing works there."""
        if isinstance(action, HandOver):
            assert not self.at_work[action.group] and self.awake[action.group] == action.leaving != action.coming
            self.awake[action.group] = None
        elif (place := _place(self.plan, action)) is not None:
            group, stage = place
            assert group not in self.awake or self.awake[group] == stage, f"{action}: {self.awake[group]} is awake"
            samples = {Admit: self.plan.samples_per_group, Evaluate: self.plan.evaluation and self.plan.evaluation.samples_per_prompt}
            self.at_work[group] += samples.get(type(action), 1)

    def _abort_evaluations(self, engine: int) -> None:
        for place, event in enumerate(self.pending):
            if isinstance(event, EvaluationSampled) and event.engine == engine:
                assert self.plan.evaluation.in_bubbles, "only evaluations in bubbles give way"
                self.pending[place] = EvaluationSampled(engine, event.prompt, event.version, True)

    def _all_judged(self, group: int) -> bool:
        return all((SampleId(group, sample), None) in self.judged for sample in range(self.plan.samples_per_group))

    def happen(self, place: int):
        """One of the pending events happens → the event."""
        event = self.pending.pop(place)
        if isinstance(event, SampleJudged):
            self.judged.add((event.id, event.version))
            if self.plan.groups_sampled_at_most and event.version is None and self._all_judged(event.id.group):
                event = replace(event, equal=self.equal(event.id.group))
        self._happen(event)
        return event

    def _happen(self, event) -> None:
        if isinstance(event, (SampleFinished, EvaluationSampled)):
            self.at_work[self.plan.rollout_group] -= 1
        elif isinstance(event, Done) and (place := _place(self.plan, event.action)) is not None:
            self.at_work[place[0]] -= 1
        match event:
            case Done(HandOver(group, _, coming)):
                self.awake[group] = coming
            case SampleJudged(sample, version, _):
                self._occupy(Judge(sample, version), -1)
                if version is not None:
                    self.evaluated[version, -1 - sample.group] += 1
            case Done(Score(part, _, key, _)):
                self.scored.add((part, key))
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
        if isinstance(action, (Admit, InstallEngine, Prepare, Evaluate, CloseEvaluation, Drop, HandOver)):
            return
        if isinstance(action, Judge) and self.plan.overlap:
            return  # on no device
        scoring = isinstance(action, (Score, InstallSnapshot, ScoreEvaluation, Judge))
        if isinstance(action, Judge):
            group = "rewards"
        elif scoring:
            group = self.plan.parts[action.part].group
        else:
            group = self.plan.train_groups[action.train_group].group
        stages = self.stage_on.setdefault(self.plan.resource(group), Counter())
        stages["score" if scoring else "train"] += change
        assert sum(count > 0 for count in stages.values()) <= 1
        if self.plan.resource(group) == self.plan.resource(self.plan.rollout_group) and change > 0:
            assert not any(self.engine_load), "engines are sampling on the same group"


def _place(plan: RunPlan, action) -> tuple[str, str] | None:
    """(device group, stage) that an action works on; None: it needs no device."""
    match action:
        case Admit() | InstallEngine() | Evaluate():
            return plan.rollout_group, "rollout"
        case Score() | InstallSnapshot() | ScoreEvaluation():
            return plan.parts[action.part].group, "score"
        case Judge() | Prepare() | CloseEvaluation() | Drop() | HandOver():
            return None
    return plan.train_groups[action.train_group].group, "train"


@st.composite
def plans(draw) -> RunPlan:
    n = draw(st.sampled_from([1, 2, 3]))
    groups_per_update = draw(st.integers(1, 3))
    updates = draw(st.integers(1, 3))
    whole = groups_per_update * updates
    steps = draw(st.lists(st.sampled_from([whole, whole, max(1, whole - 1)]), min_size=1, max_size=4))
    judged = draw(st.booleans())
    parts, workers = [ScorePart("score", ("reward",), False, ("reward",))], [draw(st.integers(1, 2))]
    if judged and draw(st.booleans()):
        parts, workers = [], []
    several = updates > 1 or draw(st.booleans())
    staleness = draw(st.integers(0, 2))
    if several:
        parts.append(ScorePart("score", ("policy_snapshot",), True))
        workers.append(workers[0] if workers else draw(st.integers(1, 2)))
    if draw(st.booleans()):
        parts.append(ScorePart("score", ("reference",), False, refresh=draw(st.integers(1, 3))))
        workers.append(workers[0] if workers else draw(st.integers(1, 2)))
    if draw(st.booleans()):
        parts.append(ScorePart("other", ("judge",), False, ("judge",)))
        workers.append(1)
    merged = draw(st.sampled_from(["apart", "score+train", "all"]))
    name = {"apart": {}, "score+train": {"score": "train"}, "all": {"score": "train", "rollout": "train"}}[merged]
    parts = [replace(part, group=name.get(part.group, part.group)) for part in parts]
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
        judged=judged,
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
        sleeping=(("train", "train"),) if merged != "apart" and draw(st.booleans()) else (),
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
    assert set(world.evaluated.values()) <= {parts + facts.samples_per_prompt * plan.judged}
    complete = [version for version in due if all(world.evaluated[version, prompt] for prompt in range(facts.prompts))]
    assert last in complete
    if not facts.in_bubbles and plan.max_staleness == 0:
        assert complete == due


@settings(max_examples=60, deadline=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30), lives=st.lists(st.integers(1, 60), max_size=3))
def test_a_run_killed_again_and_again_trains_every_group_once(plan: RunPlan, seed: int, lives: list[int]) -> None:
    """Each life goes on from the last checkpoint: its steps count, what came after them does not."""
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
    parts = tuple(replace(part, group="other" if part.group == "other" else "score") for part in plan.parts)
    plan = replace(plan, parts=parts, evaluation=EvaluationPlan(3, 1, 1, True), overlap=True, max_staleness=0,
                   rollout_group="rollout")  # fmt: skip
    world, rng, plain = World(plan), random.Random(seed), Scheduler(replace(plan, evaluation=None))
    plain.actions()
    world._take(world.scheduler.actions())
    while not world.scheduler.finished:
        # A micro-batch of evaluation that is being scored cannot give way: it is over at once here.
        quick = [i for i, event in enumerate(world.pending) if isinstance(event, Done) and isinstance(event.action, ScoreEvaluation)]
        event = world.happen(quick[0] if quick else rng.randrange(len(world.pending)))
        world.scheduler.handle(event)
        actions = world.scheduler.actions()
        world._take(actions)
        if _of_evaluation(event):
            assert all(_of_evaluation(action) for action in actions)
            continue
        plain.handle(event)
        assert [action for action in actions if not _of_evaluation(action)] == plain.actions()


def _of_evaluation(what: object) -> bool:
    """An action of an evaluation, or news of one."""
    if isinstance(what, (Judge, SampleJudged)):
        return what.version is not None
    what = what.action if isinstance(what, Done) else what
    return isinstance(what, (Evaluate, EvaluationSampled, ScoreEvaluation, CloseEvaluation))


def _train_order(plan: RunPlan, seed: int) -> list[tuple[SampleId, ...]]:
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


@st.composite
def dynamic_plans(draw) -> RunPlan:
    plan = draw(plans())
    size, steps = draw(st.integers(1, 3)), len(plan.step_groups)
    groups_per_update = draw(st.sampled_from([divisor for divisor in (1, 2, 3) if size % divisor == 0]))
    per_update = groups_per_update * plan.samples_per_group
    needs_snapshots = [part for part in plan.parts if part.versioned] or groups_per_update == size
    return replace(
        plan,
        step_groups=(size,) * steps,
        samples_per_update=per_update if needs_snapshots else size * plan.samples_per_group,
        micro_batch_size=draw(st.integers(1, per_update)),
        judged=True,
        waits_for_group=True,
        groups_sampled_at_most=draw(st.integers(size, 3 * size)),
        start_step=0,
    )


def shortest_beginning(plan: RunPlan, equal: Callable[[int], bool]) -> tuple[dict[int, set[int]], list[int]]:
    """By hand: step → its groups, and those that are left out."""
    size, group, out = plan.step_groups[0], 0, []
    steps: dict[int, set[int]] = {}
    for step in range(len(plan.step_groups)):
        seen, chosen = 0, set()
        while len(chosen) < size:
            must_stay = seen - len(chosen) == plan.groups_sampled_at_most - size
            (out.append if equal(group) and not must_stay else chosen.add)(group)
            group, seen = group + 1, seen + 1
        steps[step] = chosen
    return steps, out


@settings(max_examples=80, deadline=None)
@given(plan=dynamic_plans(), equal=st.sets(st.integers(0, 30)), data=st.data())
def test_dynamic_sampling_trains_the_shortest_beginning_of_the_prompt_order(plan: RunPlan, equal: set[int], data) -> None:
    """Whatever the order of events. With staleness the first that finish make a step, where the plan says so."""
    world = World(plan, equal.__contains__)
    world.run(lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0)
    steps, out = shortest_beginning(plan, equal.__contains__)
    if plan.order == "prompt" or plan.max_staleness == 0:
        assert world.groups == steps and sorted(world.dropped) == out
    check_dynamic(world)


def check_dynamic(world: World) -> None:
    """Every step is whole; a group is trained once or left out; no more are left out than may be."""
    plan = world.plan
    size, most = plan.step_groups[0], plan.groups_sampled_at_most
    assert all(len(groups) == size for groups in world.groups.values()) and sorted(world.groups) == list(range(len(plan.step_groups)))
    trained = [group for groups in world.groups.values() for group in groups]
    assert sorted(trained + world.dropped) == sorted(action.group for action in world.log if isinstance(action, Admit))
    assert len(trained) == len(set(trained))
    assert len(world.dropped) <= (most - size) * len(plan.step_groups)
    assert set(world.trained.values()) == {1} and len({update for _, update, _ in world.trained}) == plan.update_epochs * -(
        -size * plan.samples_per_group // plan.samples_per_update
    )


@settings(max_examples=60, deadline=None)
@given(
    plan=dynamic_plans(), equal=st.sets(st.integers(0, 30)), seed=st.integers(0, 1 << 30), lives=st.lists(st.integers(1, 80), max_size=3)
)
def test_dynamic_sampling_killed_again_and_again_trains_no_group_twice_and_loses_none(
    plan: RunPlan, equal: set[int], seed: int, lives: list[int]
) -> None:
    rng = random.Random(seed)
    plan = replace(plan, checkpoint_every=1, train_groups=plan.train_groups[:1], initial_sync=True, evaluation=None)
    whole, groups, end = plan, dict[int, set[int]](), 0
    for killed_after in [*lives, None]:
        world = World(plan, equal.__contains__)
        world.run(rng.randrange, killed_after)
        end = len(plan.step_groups) if killed_after is None or world.scheduler.finished else world.saved[0]
        groups |= {step: of for step, of in world.groups.items() if step < end}
        if end == len(plan.step_groups):
            break
        plan = replace(plan, start_step=end, carried=world.saved[1], next_group=world.saved[2])
    trained = [group for of in groups.values() for group in of]
    assert len(trained) == len(set(trained)) == sum(plan.step_groups) and sorted(groups) == list(range(end))
    assert set(range(max(trained))) - set(trained) <= equal, "a group that would stay is lost"
    if plan.max_staleness == 0:
        assert groups == shortest_beginning(whole, equal.__contains__)[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_dynamic_sampling_admits_no_more_than_may_be_needed(staleness: int) -> None:
    plan = RunPlan(step_groups=(2, 2), samples_per_group=1, samples_per_update=2, micro_batch_size=2, judged=True, parts=(),
                   part_workers=(), waits_for_group=True, groups_sampled_at_most=4, max_staleness=staleness)  # fmt: skip
    scheduler = Scheduler(plan)
    assert [action.group for action in scheduler.actions()] == [0, 1, 2, 3][: 2 + 2 * staleness]

    def judged(group: int, equal: bool) -> list:
        scheduler.handle(SampleFinished(0, SampleId(group, 0), 0))
        assert Judge(SampleId(group, 0)) in scheduler.actions()
        scheduler.handle(SampleJudged(SampleId(group, 0), None, equal))
        return scheduler.actions()

    next_group = 2 + 2 * staleness
    assert judged(1, True) == [Admit(0, next_group, staleness)], "it goes, whatever group 0 turns out to be; group 0 says of which step"
    assert judged(0, True) == [Drop(0, 0), Drop(1, 0), Admit(0, next_group + 1, staleness)]
    samples = (SampleId(2, 0), SampleId(3, 0))
    assert judged(3, True) == [], "two are out, the most that may be: it stays"
    assert judged(2, True)[0] == Prepare(0, MicroBatchKey(0, 0, 0), samples)


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_sample_that_is_never_judged_holds_up_only_what_comes_after_it(order: str) -> None:
    plan = RunPlan(step_groups=(4, 4, 4), samples_per_group=1, samples_per_update=4, micro_batch_size=1, judged=True, parts=(),
                   part_workers=(), max_staleness=1, order=order, engine_slots=2)  # fmt: skip
    world = World(plan)
    world._take(world.scheduler.actions())
    never = SampleJudged(SampleId(1, 0))
    while others := [place for place, event in enumerate(world.pending) if event != never]:
        world.scheduler.handle(world.happen(others[0]))
        world._take(world.scheduler.actions())
    assert world.pending == [never]
    admitted = [action.group for action in world.log if isinstance(action, Admit)]
    assert admitted == list(range(8)), "all that the bound allows"
    prepared = [action.samples[0].group for action in world.log if isinstance(action, Prepare)]
    assert sorted(prepared) == [0, 2, 3, 4, 5, 6, 7]
    trained = [action.samples[0].group for action in world.log if isinstance(action, Train)]
    assert trained == ([0] if order == "prompt" else [0, 2, 3])
    world.run(lambda n: 0)
    assert len(world.trained) == 12


def test_without_overlap_judging_takes_turns_and_with_it_each_sample_goes_at_once() -> None:
    for overlap in (True, False):
        plan = RunPlan(step_groups=(2,), samples_per_group=1, samples_per_update=2, micro_batch_size=1, judged=True, overlap=overlap)
        scheduler = Scheduler(plan)
        scheduler.actions()
        scheduler.handle(SampleFinished(0, SampleId(0, 0), 0))
        first = scheduler.actions()
        assert (Judge(SampleId(0, 0)) in first) == overlap
        scheduler.handle(SampleFinished(0, SampleId(1, 0), 0))
        judges = [action.sample.group for action in scheduler.actions() if isinstance(action, Judge)]
        assert judges == ([1] if overlap else [0, 1])


@pytest.mark.parametrize("start", range(6))
def test_a_refreshed_reference_scores_step_s_with_version_s_less_its_remainder(start: int) -> None:
    """Also in a run that goes on from a checkpoint, whose reference comes from there (or is what is published first)."""
    plan = RunPlan(step_groups=(1,) * 6, samples_per_group=1, samples_per_update=1, micro_batch_size=1, max_staleness=1, start_step=start,
                   initial_sync=start > 0, part_workers=(2, 1),
                   parts=(ScorePart("a", ("reference",), False, refresh=2), ScorePart("b", ("r",), False, ("r",))))  # fmt: skip
    for seed in range(5):
        world = World(plan)
        if start % 2 == 0:
            world.snapshots = {(0, worker): max(0, start - 1) for worker in range(2)}  # until that version is installed
            if start == 0:
                world.snapshots = dict.fromkeys(world.snapshots, 0)
        world.run(random.Random(seed).randrange)
        installed = {action.version for action in world.log if isinstance(action, InstallSnapshot)}
        assert installed == {version for version in (2, 4, 6) if version > start or (version == start and start)}


def _hand_overs(plan: RunPlan, seed: int) -> list[tuple[str, str]]:
    world = World(plan)
    world.run(random.Random(seed).randrange)
    return [(action.leaving, action.coming) for action in world.log if isinstance(action, HandOver)]


@pytest.mark.parametrize("overlap", [True, False])
def test_everything_on_one_group_is_handed_over_three_times_a_step(overlap: bool) -> None:
    """Whatever comes first: train → rollout → score → train, and no more moves than that."""
    plan = RunPlan(step_groups=(3, 3), samples_per_group=2, samples_per_update=6, micro_batch_size=2, engines=2, rollout_group="all",
                   parts=(ScorePart("all", ("judge",), False),), part_workers=(2,), train_groups=(TrainGroup("all", ("actor",)),),
                   overlap=overlap, sleeping=(("all", "train"),))  # fmt: skip
    for seed in range(10):
        a_step = [("train", "rollout"), ("rollout", "score"), ("score", "train")]
        assert _hand_overs(plan, seed) == [*a_step, *a_step, ("train", "rollout")]  # the last weights are installed too


def test_snapshots_are_installed_on_the_way_from_the_trainer_to_the_engines() -> None:
    plan = RunPlan(step_groups=(2, 2), samples_per_group=1, samples_per_update=1, micro_batch_size=1, rollout_group="all",
                   parts=(ScorePart("all", ("policy_snapshot",), True),), train_groups=(TrainGroup("all", ("actor",)),),
                   initial_sync=True, sleeping=(("all", "train"),))  # fmt: skip
    for seed in range(5):
        sync = [("train", "score"), ("score", "rollout")]
        assert _hand_overs(plan, seed) == [*sync, ("rollout", "score"), ("score", "train")] * 2 + sync


def test_the_trainer_is_waited_for_while_micro_batches_are_made_ready_for_it() -> None:
    """Staleness 1: engines could go on, but it would only be to sleep again at once."""
    plan = RunPlan(step_groups=(1, 1, 1), samples_per_group=1, samples_per_update=1, micro_batch_size=1, max_staleness=1, engine_slots=1,
                   rollout_group="all", parts=(ScorePart("score", ("judge",), False),), train_groups=(TrainGroup("all", ("actor",)),),
                   sleeping=(("all", "train"),))  # fmt: skip
    scheduler = Scheduler(plan)

    def told(event) -> list[object]:
        scheduler.handle(event)
        return scheduler.actions()

    assert scheduler.actions() == [HandOver("all", "train", "rollout")]
    assert told(Done(HandOver("all", "train", "rollout"))) == [Admit(0, 0, 0)]
    first = next(action for action in told(SampleFinished(0, SampleId(0, 0), 0)) if isinstance(action, Score))
    assert told(SampleFinished(0, SampleId(1, 0), 0)) == []  # step 2 has to wait for version 1
    prepare, second = told(Done(first))
    todo = told(Done(prepare))
    assert todo == [HandOver("all", "rollout", "train")]
    while not isinstance(todo[0], Publish):
        todo = told(Done(todo[0]))
    (prepare,) = told(Done(second))
    while todo:
        assert not isinstance(todo[0], HandOver), "the engines could take version 1 now, and would have to sleep again"
        todo = told(Done(todo.pop(0))) + todo
    assert isinstance(told(Done(prepare))[0], Train)
