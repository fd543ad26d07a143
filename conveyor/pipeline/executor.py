"""Carries the scheduler's actions out on Ray actors (`sampling_executor.py` has the way of doing it).

Every report becomes an event for the scheduler, a line in the books (`ledger.py`) and one in the record of the run (`recorder.py`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conveyor.config import RunError
from conveyor.data.prompts import PromptOrder
from conveyor.pipeline.actions import (
    Admit,
    Checkpoint,
    CloseEvaluation,
    Drop,
    Event,
    Finish,
    InstallEngine,
    InstallSnapshot,
    Judge,
    Prepare,
    Publish,
    SampleFinished,
    SampleJudged,
    Score,
    Train,
    Update,
)
from conveyor.pipeline.control import StepControl
from conveyor.pipeline.held_out import HeldOut
from conveyor.pipeline.ledger import Ledger
from conveyor.pipeline.publications import Publications
from conveyor.pipeline.recorder import Recorder
from conveyor.pipeline.sampling_executor import SamplingExecutor
from conveyor.pipeline.scheduler import Scheduler
from conveyor.pipeline.streams import WeightStreams
from conveyor.run_folder import RunFolder, write_control, write_untrained
from conveyor.types import Prompt, SampleId
from conveyor.workers.failures import Who
from conveyor.workers.records import RolloutRef
from conveyor.workers.reports import EvaluationAborted, Judged, MicroBatchKey, Publication, SampleDone, SampleReport, SampleRow, Span
from conveyor.workers.start import Workers

SNAPSHOT_OF = {"policy_snapshot": "actor", "critic_snapshot": "critic", "reference": "actor"}
"""Role → the trained one whose weights it takes; a reference only where it is refreshed."""


class SyncError(RunError):
    """`verify_sync` found a tensor that differs from what the trainer published."""


class Executor(SamplingExecutor):
    """One run of a scheduler on a set of workers. `await run()` once."""

    held_out: HeldOut
    recorder: Recorder

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        order: PromptOrder,
        recorder: Recorder,
        folder: RunFolder,
        held_out: Sequence[Prompt] = (),
        control: StepControl | None = None,
        streams: WeightStreams | None = None,
    ) -> None:
        """Args:
        held_out: prompts of the evaluation.
        control: what steps before a resumed run's first one say; default: a run from the start.
        streams: engines get the weights from the trainer; default: from the object store.
        """
        self.recipe = recorder.recipe
        super().__init__(scheduler, workers, HeldOut(self.recipe, scheduler.plan, held_out), recorder, self.recipe.ray.timeout)
        self.order, self.folder = order, folder
        self.ledger = Ledger(self.recipe, control)
        self._open_samples: dict[int, list[tuple[int, SampleDone]]] = defaultdict(list)
        """Group whose step is not known yet → (engine, report) of its finished samples."""
        self._holders: dict[MicroBatchKey, int] = {}
        self._streams = streams
        self._publications = Publications(self.recipe.algorithm.reference_refresh)
        self._checkpointed: Counter[int] = Counter()
        self._control_states: dict[int, dict[str, Any]] = {}
        self._groups_done: Counter[int] = Counter()
        self._finished: dict[int, tuple[list[SampleReport], list[SampleRow]]] = {}
        self._carry_out |= {
            Admit: self._admit,
            Drop: self._drop,
            Score: self._score,
            Prepare: self._prepare,
            Train: self._train,
            Update: self._update,
            Publish: self._publish,
            InstallEngine: self._install_engine,
            InstallSnapshot: self._install_snapshot,
            Checkpoint: self._checkpoint,
            Finish: self._finish,
        }

    def _handle(self, event: Event | BaseException) -> None:
        super()._handle(event)
        if isinstance(event, SampleFinished):
            self._record_samples(event.id.group)
        elif isinstance(event, SampleJudged) and self.scheduler.membership.dynamic:
            for group in list(self._open_samples):  # one that is judged can settle those that wait behind it
                self._record_samples(group)

    def _what_is_left(self) -> str:
        return self.folder.what_is_left()

    # ── rollout ──────────────────────────────────────────────────────────────────────────────────

    async def _admit(self, action: Admit) -> None:
        self.recorder.admitted(action.engine, (SampleId(action.group, k) for k in range(self.plan.samples_per_group)))
        n, greedy = self.recipe.rollout.n_samples_per_prompt, self.recipe.greedy_baseline
        await self._ask_engine(action.engine, "submit", self.order.prompt(action.group), n, greedy)

    def _left_engine(self, engine: int, report: SampleDone | EvaluationAborted, rollout: RolloutRef | None) -> Event:
        if isinstance(report, EvaluationAborted) or report.id.group < 0:
            return super()._left_engine(engine, report, rollout)
        self.ledger.add_rollout(report.id, rollout)
        self._open_samples[report.id.group].append((engine, report))
        return SampleFinished(engine, report.id, report.oldest_version)

    def _record_samples(self, group: int) -> None:
        """The events of a group's samples, as soon as its step is known."""
        step = self.scheduler.membership.step_of(group)
        if step is not None:
            for engine, done in self._open_samples.pop(group, ()):
                self.recorder.sample(engine, step, done)

    async def _drop(self, action: Drop) -> None:
        for engine, done in self._open_samples.pop(action.group, ()):
            self.recorder.sample(engine, action.step, done)
        self.recorder.dropped(action.step, self.ledger.drop(action.group))

    # ── score ────────────────────────────────────────────────────────────────────────────────────

    async def _score(self, action: Score) -> None:
        part = self.plan.parts[action.part]
        worker = self.workers.scorers[part.group][action.worker]
        rollouts = self.ledger.rollouts(action.samples)
        report, scores = worker.score.options(num_returns=2).remote(part.roles, rollouts)
        self.ledger.add_score(action.key, action.part, scores)
        done = await self.asking.one(self._scorer(action.part, action.worker), "score", report)
        self.recorder.scored(part, action.worker, action.key, done)

    def _to_judge(self, action: Judge) -> Any:
        return self.ledger.rollouts([action.sample])[0] if action.version is None else super()._to_judge(action)

    def _judged(self, judged: Judged) -> SampleJudged:
        if judged.id.group < 0:
            return super()._judged(judged)
        equal = self.ledger.add_judged(judged)
        self.recorder.judged(judged)
        return SampleJudged(judged.id, None, equal)

    async def _close_evaluation(self, action: CloseEvaluation) -> None:
        self.recorder.close_evaluation(self.held_out.close(action.version))

    # ── train ────────────────────────────────────────────────────────────────────────────────────

    async def _on_ranks(self, train_group: int, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank of a train group; their answers in rank order."""
        group = self.plan.train_groups[train_group].group
        calls = [getattr(rank, method).remote(*arguments) for rank in self.workers.trainers[train_group]]
        return await self.asking.all([(Who("train", group, rank), call) for rank, call in enumerate(calls)], method)

    async def _prepare(self, action: Prepare) -> None:
        rollouts, scores = self.ledger.rollouts(action.samples), self.ledger.scores(action.key, action.samples)
        settings = self.ledger.settings(action.key.step)
        if self.recipe.algorithm.kl_target is not None:
            self.recorder.kl_coefs[action.key.step] = settings.kl_coef
        reports = await self._on_ranks(action.train_group, "prepare", action.key, rollouts, scores, settings)
        self.ledger.add_reports(action.train_group, reports)
        self.recorder.prepared(action.train_group, action.key, reports)
        self._holders[action.key] = self._holders.get(action.key, 0) + 1
        if self._holders[action.key] == len(self.plan.train_groups):
            del self._holders[action.key]
            self.ledger.release(action.key, action.samples)

    async def _train(self, action: Train) -> None:
        context = self.ledger.context(action.train_group, action.key, action.samples)
        reports = await self._on_ranks(action.train_group, "forward_backward", action.key, context, action.last)
        self.ledger.add_train_reports(action.train_group, action.key, reports)
        self.recorder.trained(action.train_group, action.key, reports)

    async def _update(self, action: Update) -> None:
        await self._store_for_late_engines(action.train_group)
        denominators = self.ledger.denominators(action.train_group, action.step, action.base)
        reports = await self._on_ranks(action.train_group, "optim_step", denominators)
        self.recorder.updated(action.train_group, action.step, reports, denominators.whiten)

    async def _finish(self, action: Finish) -> None:
        """The step's record is written when its last train group is done; its samples are the actor's."""
        rows = await self._on_ranks(action.train_group, "finish_step", action.step)
        samples = self.ledger.finish_step(action.train_group, action.step)
        if action.train_group == 0:
            self._finished[action.step] = (samples, [row for of_rank in rows for row in of_rank])
        self._groups_done[action.step] += 1
        if self._groups_done[action.step] == len(self.plan.train_groups):
            del self._groups_done[action.step]
            self.recorder.finish_step(action.step, *self._finished.pop(action.step))

    # ── weights ──────────────────────────────────────────────────────────────────────────────────

    async def _publish(self, action: Publish) -> None:
        wanted = {"actor", *(SNAPSHOT_OF[role] for role in self.recipe.snapshot_roles)}
        for role in self.plan.train_groups[action.train_group].roles:
            if role in wanted:
                publication = await self._published(action.train_group, action.version, role)
                self._publications.add(publication)
                self.recorder.published(action.train_group, publication)

    async def _published(self, train_group: int, version: int, role: str) -> Publication:
        """Into the object store, unless only engines want it and they get it from the trainer."""
        if self._streams is None or role != "actor":
            return await self._stored(train_group, version, role)
        publication: Publication = (await self._on_ranks(train_group, "publish", version, role, False))[0]
        if "policy_snapshot" in self.recipe.snapshot_roles or self.recipe.algorithm.reference_refresh is not None:
            publication = replace(await self._stored(train_group, version, role), layout=publication.layout)
        self._streams.announce(publication)
        return publication

    async def _stored(self, train_group: int, version: int, role: str) -> Publication:
        publication: Publication = (await self._on_ranks(train_group, "publish", version, role))[0]
        return publication

    async def _store_for_late_engines(self, train_group: int) -> None:
        """An update is about to change the actor's weights, and there are engines that have not asked for them."""
        if self._streams is not None and "actor" in self.plan.train_groups[train_group].roles:
            late = self._streams.late()
            if late is not None:
                stored = late if late.buckets else await self._stored(train_group, late.version, "actor")
                self._publications.add(replace(stored, layout=()))

    async def _install_engine(self, action: InstallEngine) -> None:
        publication = self._publications.get("actor", action.version)
        if publication.layout and self._streams is not None:
            streamed = self._streams.install(action.engine, publication)
            report = await self.asking.one(self._engine(action.engine), "install", streamed)
        else:
            report = await self._ask_engine(action.engine, "install", publication)
        self._verify(f"rollout engine {action.engine}", report.mismatched)
        self.recorder.installed(self.plan.rollout_group, "rollout", action.engine, report)

    async def _install_snapshot(self, action: InstallSnapshot) -> None:
        part = self.plan.parts[action.part]
        worker = self.workers.scorers[part.group][action.worker]
        for role in part.roles:
            if role in SNAPSHOT_OF and (role != "reference" or part.refresh is not None):
                call = worker.install.remote(role, self._publications.get(SNAPSHOT_OF[role], action.version))
                report = await self.asking.one(self._scorer(action.part, action.worker), "install", call)
                self._verify(f"{role} on {part.group} {action.worker}", report.mismatched)
                self.recorder.installed(part.group, role, action.worker, report)

    def _verify(self, where: str, mismatched: tuple[str, ...]) -> None:
        if mismatched:
            names = ", ".join(mismatched[:5]) + (f" and {len(mismatched) - 5} more" if len(mismatched) > 5 else "")
            raise SyncError(f"verify_sync: {where} holds other weights than the trainer published: {names}")

    async def _checkpoint(self, action: Checkpoint) -> None:
        """Train groups write into one folder, which takes its name when the last is done."""
        aside, start = self.folder.begin_checkpoint(action.step), time.time()
        if action.train_group == 0:  # whose reports the settings of later steps come from; it may be a step further when others are done
            self._control_states[action.step] = self.ledger.state(action.step)
        await self._on_ranks(action.train_group, "save_checkpoint", str(aside))
        self.recorder.checkpointed(action.train_group, action.step, Span(start, time.time()))
        self._checkpointed[action.step] += 1
        if self._checkpointed[action.step] == len(self.plan.train_groups):
            await self._save_reference(action.step, aside)
            write_untrained(aside, *self.scheduler.membership.untrained(action.step))
            write_control(aside, self._control_states.pop(action.step))
            self.folder.commit_checkpoint(action.step, self.recipe.checkpoint.keep)

    async def _save_reference(self, step: int, folder: Path) -> None:
        """A reference that was refreshed, unless it is what is published for this very step. It has its version on every worker: the
        step before has been scored with it."""
        for number, part in enumerate(self.plan.parts):
            if part.refresh is not None and step % part.refresh and step > part.refresh:
                call = self.workers.scorers[part.group][0].save_weights.remote("reference", str(folder))
                await self.asking.one(self._scorer(number, 0), "save_weights", call)
