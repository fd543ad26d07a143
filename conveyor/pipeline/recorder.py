"""The record of a run: every report becomes events, and at a step's end a line of metrics.

The executor reports what happened; names, units and files (design: a run's folder) are decided here.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from conveyor.algorithms.metrics import Mean, Metrics, merge
from conveyor.algorithms.objective import streaming_coefficients
from conveyor.config import OnlineRecipe, RunError
from conveyor.pipeline.event_record import REWARDS, EventRecord, Place
from conveyor.pipeline.run_plan import RunPlan, ScorePart
from conveyor.pipeline.step_metrics import drop_metrics, optim_metrics, sample_metrics, sync_metrics
from conveyor.report.events import JUDGE, Event
from conveyor.report.progress import MetricsLog
from conveyor.report.timeline import busy_bound, step_idle
from conveyor.run_folder import RunFolder
from conveyor.types import SampleId
from conveyor.workers.clocks import Clocks
from conveyor.workers.reports import (
    InstallReport,
    Judged,
    MicroBatchKey,
    OptimReport,
    PrepareReport,
    Publication,
    SampleDone,
    SampleReport,
    SampleRow,
    ScoreReport,
    Span,
    TrainReport,
)

log = logging.getLogger(__name__)

LOST_STEPS = 10
"""Steps in a row without any finite gradient, after which a run ends."""


class Recorder(EventRecord):
    """Writes events.jsonl, samples.jsonl and metrics.jsonl; calls `on_step(row)` for each finished step."""

    def __init__(
        self,
        recipe: OnlineRecipe,
        plan: RunPlan,
        folder: RunFolder,
        on_step: Callable[[dict[str, Any]], None],
        clocks: Clocks | None = None,
    ) -> None:
        super().__init__(plan, folder, clocks)
        self.recipe, self.on_step = recipe, on_step
        self._metrics = MetricsLog(folder.metrics)
        self._evaluations = MetricsLog(folder.evaluations)
        self._samples_file = folder.samples.open("a", encoding="utf-8")
        self._recent: list[Event] = []
        self._judged: dict[SampleId, Judged] = {}
        self._dropped: dict[int, list[Sequence[Judged]]] = defaultdict(list)
        self._last_of_device: dict[str, Event] = {}
        self._train_metrics: dict[int, list[Metrics]] = defaultdict(list)
        self._whiten: dict[int, tuple[float, float]] = {}
        self._optim: dict[int, list[OptimReport]] = defaultdict(list)
        self._failures: dict[int, Metrics] = defaultdict(dict)
        self._in_flight: dict[SampleId, tuple[int, float]] = {}
        self._published: dict[int, list[tuple[int, float]]] = defaultdict(list)
        """Step → (bytes, seconds) of what it published."""
        self._installs: list[float] = []
        """Seconds, since the last line of metrics."""
        self._window_start: float | None = None
        self._lost_steps = 0
        self.kl_coefs: dict[int, float] = {}
        """Of open steps, where the adaptive controller moves it."""
        self.last_row: dict[str, Any] = {}

    def close(self) -> None:
        super().close()
        self._metrics.close()
        self._evaluations.close()
        self._samples_file.close()

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _keep(self, event: Event) -> None:
        super()._keep(event)
        if event.task != JUDGE:
            self._recent.append(event)
            self._last_of_device[event.place] = event

    def admitted(self, engine: int, samples: Iterable[SampleId]) -> None:
        """The first step's clock starts with its first sample, later ones' where the last ended."""
        now = time.time() - self._zero
        if self._window_start is None:
            self._window_start = now
        self._in_flight |= {sample: (engine, now) for sample in samples}

    def sample(self, engine: int, step: int, done: SampleDone) -> None:
        worker = Place("rollout", self.plan.rollout_group, engine)
        self._in_flight.pop(done.id, None)
        self._event(worker, "rollout", "rollout", done.span, step=step, version=done.newest_version, samples=[done.id])

    def scored(self, part: ScorePart, worker: int, key: MicroBatchKey, report: ScoreReport) -> None:
        where, roles = Place("score", part.group, worker), "+".join(part.roles)
        self._event(where, roles, "score", report.span, step=key.step, micro_batch=self._number(key), version=key.step)

    def judged(self, judged: Judged) -> None:
        """Its event and its failures are written when the sample's step is known."""
        self._judged[judged.id] = judged

    def dropped(self, step: int, judged: Sequence[Judged]) -> None:
        """Dynamic sampling: a group that would have been of this step is left out."""
        self._dropped[step].append(judged)
        for one in judged:
            self._record_judged(step, one)

    def _record_judged(self, step: int, judged: Judged) -> None:
        self._judged.pop(judged.id, None)
        self._event(REWARDS, "+".join(judged.rewards), JUDGE, judged.span, step=step, version=judged.version, samples=[judged.id])
        failures: Metrics = {"reward/timeouts": Mean(judged.timeouts, 1), "reward/errors": Mean(judged.errors, 1)}
        self._failures[step] = merge([self._failures[step], failures])

    def close_evaluation(self, line: dict[str, Any]) -> None:
        self._evaluations.append(line)

    def prepared(self, train_group: int, key: MicroBatchKey, reports: Sequence[PrepareReport]) -> None:
        samples = [[sample.id for sample in report.samples] for report in reports]
        self._on_ranks(train_group, "prepare", key.step, [report.span for report in reports], self._number(key), samples)
        for sample in (sample for of_rank in samples for sample in of_rank):
            if (judged := self._judged.get(sample)) is not None:
                self._record_judged(key.step, judged)

    def trained(self, train_group: int, key: MicroBatchKey, reports: Sequence[TrainReport]) -> None:
        self._train_metrics[key.step] += [report.metrics for report in reports]
        self._on_ranks(train_group, "train", key.step, [report.span for report in reports], self._number(key))

    def updated(self, train_group: int, step: int, reports: Sequence[OptimReport], whiten: tuple[float, float] | None = None) -> None:
        self._optim[step].append(reports[0])
        self._train_metrics[step] += [report.metrics for report in reports]
        if whiten is not None:
            self._whiten[step] = whiten
        self._on_ranks(train_group, "update", step, [report.span for report in reports])

    def published(self, train_group: int, publication: Publication) -> None:
        seconds = publication.span.end - publication.span.start
        self._published[publication.version - 1].append((publication.nbytes, seconds))
        self._on_ranks(train_group, "publish", publication.version - 1, [publication.span])

    def checkpointed(self, train_group: int, step: int, span: Span) -> None:
        """`span` is of the driver's clock."""
        ahead = self._clock_offsets.get(Place("train", self.plan.train_groups[train_group].group, 0), 0.0)
        self._on_ranks(train_group, "checkpoint", step - 1, [Span(span.start + ahead, span.end + ahead)])

    def installed(self, group: str, role: str, worker: int, report: InstallReport) -> None:
        self._installs.append(report.span.end - report.span.start)
        where = Place("rollout" if role == "rollout" else "score", group, worker)
        self._event(where, role, "install", report.span, step=report.version - 1, version=report.version)

    def _on_ranks(
        self,
        train_group: int,
        task: str,
        step: int,
        spans: Sequence[Span],
        micro_batch: int | None = None,
        samples: Sequence[Sequence[SampleId]] | None = None,
    ) -> None:
        """`samples`: each rank's share, where the task tells."""
        group = self.plan.train_groups[train_group]
        for rank, (span, share) in enumerate(zip(spans, samples or [[]] * len(spans), strict=True)):
            worker, roles = Place("train", group.group, rank), "+".join(group.roles)
            self._event(worker, roles, task, span, step=step, micro_batch=micro_batch, version=step, samples=share)

    def _number(self, key: MicroBatchKey) -> int:
        """Micro-batches are counted through the updates of their step."""
        return key.update * -(-self.plan.samples_per_update // self.plan.micro_batch_size) + key.number

    # ── a step's end ─────────────────────────────────────────────────────────────────────────────

    def finish_step(self, step: int, samples: Sequence[SampleReport], rows: Sequence[SampleRow]) -> None:
        """Write the step's lines."""
        now = time.time() - self._zero
        row: dict[str, Any] = {"step": step + 1}
        merged = merge(self._train_metrics.pop(step, []))
        # A mean of nothing, say of the pairs of a step without any, is no 0.
        row |= {name: None if isinstance(metric, Mean) and not metric.count else metric.value for name, metric in merged.items()}
        if (ones := row.pop("loss/policy_ones", None)) is not None:
            parts = {"advantages": row["loss/policy"], "ones": ones}
            coefficients = streaming_coefficients(*self._whiten.pop(step))
            row["loss/policy"] = sum(coefficients.get(name, 0.0) * part for name, part in parts.items())
        row |= sample_metrics(self.recipe, step, samples)
        row |= drop_metrics(self.recipe, self._dropped.pop(step, []), samples)
        row |= {name: metric.total for name, metric in self._failures.pop(step, {}).items() if isinstance(metric, Mean) and metric.total}
        self._look_at_gradients(step, reports := self._optim.pop(step, []))
        row |= optim_metrics(reports)
        if (kl_coef := self.kl_coefs.pop(step, None)) is not None:
            row["kl_coef"] = kl_coef
        row |= sync_metrics(self._published.pop(step, []), self._installs)
        self._installs.clear()
        row |= self._time_metrics(row["tokens"], now)
        row["version"] = step + 1
        if row["truncated_fraction"] == 1:
            log.warning(
                "step %d: every response was cut at rollout.max_response_length (%d)", step + 1, self.recipe.rollout.max_response_length
            )
        self._metrics.append(row)
        self._write_samples(step, rows)
        self.flush()
        self.last_row = row
        self.on_step(row)

    def _look_at_gradients(self, step: int, reports: Sequence[OptimReport]) -> None:
        """Updates without a finite gradient change nothing: the user is told, and a run that does nothing else ends.

        Raises:
            RunError: it is the tenth step in a row.
        """
        lost = sorted({role for report in reports for role, done in report.steps.items() if not math.isfinite(done.grad_norm)})
        learnt = any(not done.skipped for report in reports for done in report.steps.values())
        self._lost_steps = self._lost_steps + 1 if lost and not learnt else 0
        if lost:
            log.warning("step %d: a gradient of the %s is not finite; that update changes no weight", step + 1, " and the ".join(lost))
        if self._lost_steps == LOST_STEPS:
            raise RunError(f"no update of the last {LOST_STEPS} steps had a finite gradient; look at rewards, KL and learning rate")

    def _time_metrics(self, tokens: int, now: float) -> dict[str, Any]:
        start = self._window_start if self._window_start is not None else 0.0
        window, self._window_start = (start, now), now
        seconds = max(now - start, 1e-9)
        # A device that did nothing in this window is idle, not absent.
        events = [*self._recent, *self._last_of_device.values(), *self._still_sampling(now)]
        idle, bound = step_idle(events, window), busy_bound(events, window)
        self._recent = [event for event in self._recent if event.end > now]
        return {
            "tokens_per_second": tokens / seconds,
            "time/step": seconds,
            **{f"idle/{group}": share for group, share in idle.items()},
            "pipeline/bound": bound.seconds,
            "pipeline/efficiency": bound.efficiency,
        }

    def _still_sampling(self, now: float) -> Iterator[Event]:
        """Samples of later steps have no event yet, but keep their engine busy."""
        for engine, start in self._in_flight.values():
            worker = Place("rollout", self.plan.rollout_group, engine)
            yield Event(worker.group, worker.name, "rollout", "rollout", -1, None, None, start, now, worker.device)

    def _write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for row in sorted(rows, key=lambda row: row.id):
            line = {"step": step + 1, "group": row.id.group, "sample": row.id.sample, "prompt": row.prompt, "response": row.response,
                    "rewards": dict(row.rewards), "score": row.score, "advantage": row.advantage, "version": row.version,
                    "finish_reason": row.finish_reason,
                    "prompt_length": row.prompt_length, "response_length": row.response_length}  # fmt: skip
            self._samples_file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._samples_file.flush()
