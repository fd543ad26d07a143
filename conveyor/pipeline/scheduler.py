"""The scheduler: a pure state machine that says what may start.

No Ray, no clock, no threads: events go in (`handle`), actions come out (`actions`). The executor
carries actions out on Ray actors, the simulator on a virtual clock; both drive this very class.

    prompts ─▶ Admit ─▶ Judge, Score (each part) ─▶ Prepare ─▶ Train … Train ─▶ Update ─▶ Publish ─▶ Install
                 ▲                                                                              │
                 └────────────────── the next step, once its version may start ◀────────────────┘

| action             | waits for                                                                    |
|--------------------|------------------------------------------------------------------------------|
| Admit group        | the group before it; room in an engine; step − engine's version ≤ staleness  |
|                    | (`membership.py`)                                                            |
| Judge sample       | the sample: functions and urls need no device                                |
| Score part         | all samples of the micro-batch; a free worker; snapshots: version = step;    |
|                    | dynamic sampling: its groups are judged, and stay (`selection.py`)           |
| Prepare            | every part of the micro-batch, and the judging of its samples                |
| Train              | its turn in the update; with group baselines: its groups prepared; with      |
|                    | whitening: the whole update prepared; at most one other at the train group   |
| Update             | every micro-batch of the update trained                                      |
| Publish            | the step's last update                                                       |
| InstallEngine      | the version published; without in-flight updates: the engine drained         |
| InstallSnapshot    | the version published; the worker free                                       |
| Checkpoint, Finish | the step published                                                           |
| Evaluate           | a version due for evaluation; an engine with nothing else to do (`evaluation.py`) |
| HandOver           | the turn of a stage that sleeps (`awake.py`)                                 |

Device groups are resources: tasks of two stages never run on one group at once (`turns.py`). With
overlap off every task asks for one and the same resource, which makes the stages take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from conveyor.pipeline.actions import (
    Action,
    Admit,
    Checkpoint,
    CloseEvaluation,
    Drop,
    Evaluate,
    EvaluationSampled,
    Event,
    Finish,
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
from conveyor.pipeline.awake import Awake
from conveyor.pipeline.batching import UpdateBatcher, cut_into_updates
from conveyor.pipeline.engine_pool import EnginePool
from conveyor.pipeline.evaluation import Evaluation
from conveyor.pipeline.membership import Membership
from conveyor.pipeline.run_plan import RunPlan
from conveyor.pipeline.score_stage import ScoreStage
from conveyor.pipeline.train_line import TrainLine
from conveyor.pipeline.turns import Turns
from conveyor.types import SampleId

REWARDS = "rewards"
"""Where functions and urls run: on no device, but without overlap they take their turn too."""


class Scheduler:
    """Drives one run. A driver calls `actions()`, carries them out, and calls `handle(event)` and
    `actions()` again for everything that happens, until `finished`.

    Example: a fresh scheduler's `actions()` admits the first groups; each `SampleFinished` handed to
    `handle` may complete a micro-batch, whose `Score` actions the next `actions()` returns.
    """

    def __init__(self, plan: RunPlan) -> None:
        assert plan.step_groups or plan.evaluation, "a run has steps, or only evaluates"
        assert all(groups > 0 for groups in plan.step_groups), "a step has groups"
        self.plan = plan
        self.membership = Membership(plan)
        self._updates: dict[int, tuple[UpdateBatcher, ...]] = {}
        self._oldest: dict[int, int] = {}
        """Groups in flight → oldest version of their finished samples."""
        self._group_samples: dict[int, list[SampleId]] = {}
        """Finished samples of groups whose step is not known yet."""
        self._judged: Counter[int] = Counter()
        """Dynamic sampling: group in flight → its samples that are judged."""
        self._dropped: list[Drop] = []

        # Before an initial sync nothing holds the first version yet.
        self._published = plan.start_step - 1 if plan.initial_sync else plan.start_step
        self._publishing: Counter[int] = Counter()
        self._finishing: Counter[int] = Counter()
        self.engines = EnginePool(plan, self._published)
        self.scoring = ScoreStage(plan, self._published)
        self._lines = [TrainLine(plan, number) for number in range(len(plan.train_groups))]
        self._turns = Turns()
        self.awake = Awake(plan)
        self._preparing: Counter[str | None] = Counter()
        """Train group's device group → its micro-batches that will soon be ready to train."""
        self.evaluation = Evaluation(plan)
        if not plan.initial_sync:
            self.evaluation.open(self._published)

    # ── what a driver calls ──────────────────────────────────────────────────────────────────────

    @property
    def finished(self) -> bool:
        """Every step is trained, let go of, and its weights installed everywhere."""
        end = len(self.plan.step_groups)
        if any(line.step != end for line in self._lines):
            return False
        installed = all(version == end for version in self.engines.versions) and not self.scoring.installing
        return installed and self.evaluation.finished

    @property
    def version(self) -> int:
        """Newest published version."""
        return self._published

    def actions(self) -> list[Action]:
        """Everything that may start now, each exactly once, in an order that depends on the events alone."""
        started: list[Action] = [
            Prepare(line.number, micro_batch.key, micro_batch.samples) for micro_batch in self.scoring.take_ready() for line in self._lines
        ]
        self._preparing.update(self._group(action) for action in started if isinstance(action, Prepare))
        started += self._dropped
        self._dropped.clear()
        if self.plan.overlap:  # nothing to take turns with
            started += self.scoring.take_unjudged()
            started += self.evaluation.take_unjudged()
        while action := self._next_action():
            self._start(action)
            started.append(action)
        while self.plan.evaluation and (close := self.evaluation.to_close(self.engines.held, self._published)):
            self.evaluation.start_close(close)
            started.append(close)
        return started

    def handle(self, event: Event) -> None:
        """Take note of something that happened."""
        match event:
            case SampleFinished():
                self._sample_finished(event)
            case SampleJudged():
                self._sample_judged(event)
            case EvaluationSampled():
                self._evaluation_sampled(event)
            case _:
                self._done(event.action)

    # ── what is due ──────────────────────────────────────────────────────────────────────────────

    def _next_action(self) -> Action | None:
        due: dict[tuple[str, str], Action] = {}
        for stage, actions in (("train", self._training()), ("score", self._scoring()), ("rollout", self._sampling())):
            for action in actions:
                if self._may_have_its_turn(action, stage):
                    due.setdefault((self._resource(action), stage), action)
        turn = self._turns.next(due)
        if turn is None:
            return None
        self._turns.start(*turn)
        return self.awake.before(self._group(due[turn]), turn[1]) or due[turn]

    def _may_have_its_turn(self, action: Action, stage: str) -> bool:
        """Not while its group is handed over, nor does it wake its stage when the trainer is about to have something to do."""
        group = self._group(action)
        if group is None:
            return True
        return not self.awake.moving(group) and not (stage != "train" and self._preparing[group] and self.awake.is_asleep(group, stage))

    def _sampling(self) -> Iterator[Action]:
        engine = self.engines.to_install(self._keeps_version)
        if engine is not None:
            yield InstallEngine(engine, self._published)
        held_out = self.plan.evaluation is not None
        if held_out:
            yield from self._evaluating(first=True)
        group = self.membership.next_group
        if group is not None and (engine := self.engines.able(self.membership.may_admit)) is not None:
            yield Admit(engine, group, self.membership.expected_step)
        if held_out:
            yield from self._evaluating(first=False)

    def _keeps_version(self, version: int) -> bool:
        """An evaluation that does not give way is still sampling."""
        facts = self.plan.evaluation
        return facts is not None and not facts.in_bubbles and self.evaluation.sampling(version)

    def _evaluating(self, first: bool) -> Iterator[Action]:
        """Held-out prompts: before the training's (`first`), or on engines that have none of those."""
        facts = self.plan.evaluation
        if facts is None or first == facts.in_bubbles or self.evaluation.finished:
            return
        for engine, version in enumerate(self.engines.versions):
            prompt = self.evaluation.next_prompt(version)
            may = self.engines.idle(engine) if facts.in_bubbles else not self.engines.installing(engine)
            if prompt is not None and may and self.engines.has_room(engine, facts.samples_per_prompt):
                yield Evaluate(engine, prompt, version)
                return

    def _scoring(self) -> Iterator[Action]:
        yield from self.scoring.to_judge[:1] or self.evaluation.to_judge[:1]
        yield from self.scoring.due()
        if not self.evaluation.finished:
            for part in self.scoring.without_work():
                yield from self._scoring_evaluation(part)

    def _scoring_evaluation(self, part: int) -> Iterator[Action]:
        """Evaluations are scored when the training has nothing to score. Where it will have within the step (its samples are in
        the engines), they wait too, unless such a time never comes."""
        plan, group = self.plan, self.plan.parts[part].group
        never = plan.max_staleness > 0 or not plan.overlap or group in [line.group for line in plan.train_groups]
        if never or not (self.engines.sampling or self.scoring.micro_batches):
            for worker in self.scoring.free_workers(part):
                if action := self.evaluation.to_score(part, worker):
                    yield action
                    return

    def _training(self) -> Iterator[Action]:
        for line in self._lines:
            if action := line.due(self._updates.get(line.step)):
                yield action

    # ── transitions ──────────────────────────────────────────────────────────────────────────────

    def _start(self, action: Action) -> None:
        match action:
            case Admit(engine, group, _):
                self.engines.admit(engine, group)
                self.membership.admit(self.engines.versions[engine])
                if (step := self.membership.step_of(group)) is not None:
                    self._open_step(step)
            case HandOver():
                self.awake.start(action)
            case InstallEngine(engine, version):
                self.engines.install(engine, version)
            case Evaluate(engine, _, _):
                self.evaluation.start(action)
                self.engines.evaluate(engine, self.plan.evaluation.samples_per_prompt)  # type: ignore[union-attr]
            case Judge(_, version):
                (self.scoring if version is None else self.evaluation).to_judge.remove(action)
            case InstallSnapshot() | Score() | ScoreEvaluation():
                self.scoring.start(action)
                if isinstance(action, ScoreEvaluation):
                    self.evaluation.start_score(action)
            case Train() | Update() | Publish() | Checkpoint() | Finish():
                self._lines[action.train_group].start(action)

    def _open_step(self, step: int) -> None:
        if step not in self._updates:
            plan = self.plan
            total = plan.step_groups[step] * plan.samples_per_group
            # Of dynamic sampling in prompt order the groups come in their order, once they are certain.
            by_arrival = self.membership.by_completion or self.membership.dynamic
            samples = None if by_arrival else self.membership.samples(step)
            order: Literal["prompt", "completion"] = "completion" if by_arrival else plan.order
            self._updates[step] = cut_into_updates(step, total, plan.samples_per_update, plan.micro_batch_size, order, samples)

    def _sample_finished(self, event: SampleFinished) -> None:
        group = event.id.group
        whole = self.engines.sample_finished(event.engine, group)
        if whole:
            # An Admit takes one turn, however many samples it brings.
            self._turns.end(self.plan.resource(self.plan.rollout_group))
        self._oldest[group] = min(event.oldest_version, self._oldest.get(group, event.oldest_version))
        if self.plan.judged:
            self.scoring.judge(event.id)
        if self.membership.dynamic:
            self._group_samples.setdefault(group, []).append(event.id)
            return
        step = self.membership.step_of(group)
        # In completion order micro-batches are filled as samples come. Where training waits for whole groups they are filled by
        # groups, or each would hold samples of all groups in the engines and wait for the last of them.
        by_group = self.plan.order == "completion" and self.plan.waits_for_group
        if step is not None and not by_group:
            self._place(step, [event.id])
        else:
            self._group_samples.setdefault(group, []).append(event.id)
        if whole:
            self._group_finished(group)

    def _sample_judged(self, event: SampleJudged) -> None:
        if not self.plan.overlap:
            self._turns.end(self.plan.resource(REWARDS))
        if event.version is not None:
            self.evaluation.judged(event)
            return
        self.scoring.judged(event.id)
        if self.membership.dynamic:
            group = event.id.group
            self._judged[group] += 1
            if self._judged[group] == self.plan.samples_per_group:
                del self._judged[group]
                self._group_judged(group, event.equal)

    def _group_judged(self, group: int, equal: bool) -> None:
        """Dynamic sampling: some groups are certain now to stay, or to be left out."""
        kept, dropped = self.membership.judged(group, equal)
        if equal or dropped:  # it is certain to go, or to have gone
            self.engines.group_dropped()
        for out, step in dropped:
            self._dropped.append(Drop(out, step))
            del self._group_samples[out], self._oldest[out]
        for stays, step in kept:
            self._enter(stays, step)

    def _group_finished(self, group: int) -> None:
        self._enter(group, self.membership.finish(group))

    def _enter(self, group: int, step: int) -> None:
        """A group's step is known, and all its samples are there."""
        staleness = step - self._oldest.pop(group)
        assert 0 <= staleness <= self.plan.max_staleness, f"group {group}: staleness {staleness} is out of bounds"
        self._open_step(step)
        samples = self._group_samples.pop(group, [])
        self._place(step, sorted(samples) if self.membership.dynamic else samples)

    def _place(self, step: int, samples: list[SampleId]) -> None:
        """Finished samples enter the updates of their step."""
        for sample in samples:
            if self.membership.by_completion or self.membership.dynamic:
                batcher = next(batcher for batcher in self._updates[step] if not batcher.full)
            else:
                batcher = self._updates[step][self.membership.place(sample) // self.plan.samples_per_update]
            micro_batch = batcher.finish(sample)
            if micro_batch is not None:
                self.scoring.add(micro_batch)

    def _evaluation_sampled(self, event: EvaluationSampled) -> None:
        self.engines.evaluated(event.engine, event.version)
        if self.evaluation.sampled(event):
            self._turns.end(self.plan.resource(self.plan.rollout_group))

    def _done(self, action: Action) -> None:
        if not isinstance(action, (Prepare, CloseEvaluation)):
            self._turns.end(self._resource(action))
        match action:
            case HandOver():
                self.awake.done(action)
            case Score() | InstallSnapshot() | ScoreEvaluation():
                self.scoring.done(action)
                if isinstance(action, ScoreEvaluation):
                    self.evaluation.scored(action)
            case InstallEngine(engine, version):
                self.engines.installed(engine, version, self._published)
            case CloseEvaluation():
                self.evaluation.closed(action)
            case Admit() | Evaluate() | Judge() | Drop():
                raise AssertionError("answered by samples, or by nothing")
            case Prepare() | Train() | Update() | Publish() | Checkpoint() | Finish():
                line = self._lines[action.train_group]
                self._preparing[self._group(action)] -= isinstance(action, Prepare)
                line.done(action, len(self._updates.get(line.step, ())))
                self._after_train_task(action)

    def _after_train_task(self, action: Action) -> None:
        """A version counts as published, and a step as let go of, when every train group has done so."""
        match action:
            case Publish(_, version):
                self._publishing[version] += 1
                if self._publishing[version] == len(self._lines):
                    self._published = version
                    self.evaluation.open(version)
                    self.engines.published()
                    self.scoring.published(version)
            case Finish(_, step):
                self._finishing[step] += 1
                if self._finishing[step] == len(self._lines):
                    del self._updates[step], self._finishing[step]
                    self.membership.forget(step)
                    self._publishing.pop(step, None)

    def _resource(self, action: Action) -> str:
        return self.plan.resource(self._group(action) or REWARDS)

    def _group(self, action: Action) -> str | None:
        """The device group that it runs on; None: on no device."""
        match action:
            case HandOver(group, _, _):
                return group
            case Admit() | InstallEngine() | Evaluate():
                return self.plan.rollout_group
            case Score(part, _, _, _) | InstallSnapshot(part, _, _) | ScoreEvaluation(part, _, _, _):
                return self.plan.parts[part].group
            case Judge():
                return None
            case CloseEvaluation() | Drop():
                raise AssertionError("needs no resource")
            case _:
                return self.plan.train_groups[action.train_group].group
