"""events.jsonl: every report becomes an event. What held-out prompts leave is here; `recorder.py` adds what a training does."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from conveyor.pipeline.run_plan import RunPlan, ScorePart
from conveyor.report.events import JUDGE, Event, EventLog, read_events
from conveyor.run_folder import RunFolder
from conveyor.types import SampleId
from conveyor.workers.clocks import Clocks
from conveyor.workers.reports import Judged, ScoreReport, Span


@dataclass(frozen=True, slots=True)
class Place:
    """A worker, as events name it."""

    stage: str
    group: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.stage} {self.index}" if self.stage == self.group else f"{self.stage} {self.group} {self.index}"

    @property
    def device(self) -> str:
        """Workers of one slot of a group share its device, whatever their stage."""
        return f"{self.group} {self.index}"


REWARDS = Place("rewards", "rewards", 0)


class EventRecord:
    """Appends to events.jsonl until `close`."""

    def __init__(self, plan: RunPlan, folder: RunFolder, clocks: Clocks | None = None) -> None:
        self.plan = plan
        self._clock_offsets = _clock_offsets(plan, clocks or Clocks())
        # A resumed run's clock goes on where its earlier events end.
        earlier = read_events(folder.events) if folder.events.exists() else []
        self._zero = time.time() - max((event.end for event in earlier), default=0.0)
        self._events = EventLog(folder.events)

    def flush(self) -> None:
        """Make it visible to readers."""
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def evaluated(self, engine: int, version: int, span: Span) -> None:
        """A sample of a held-out prompt, finished or not."""
        self._event(Place("rollout", self.plan.rollout_group, engine), "rollout", "evaluate", span, step=version, version=version)

    def scored_evaluation(self, part: ScorePart, worker: int, version: int, report: ScoreReport) -> None:
        where, roles = Place("score", part.group, worker), "+".join(part.rewards)
        self._event(where, roles, "evaluate", report.span, step=version, version=version)

    def judged_held_out(self, judged: Judged) -> None:
        self._event(REWARDS, "+".join(judged.rewards), JUDGE, judged.span, step=judged.version, version=judged.version, samples=[judged.id])

    def moved(self, where: Place, task: str, step: int, span: Span) -> None:
        """A worker went to sleep, or woke. `span` is of the driver's clock."""
        offset = self._clock_offsets.get(where, 0.0)
        span = Span(span.start + offset, span.end + offset)
        self._event(where, where.stage, task, span, step=step, version=step)

    def _event(
        self,
        worker: Place,
        role: str,
        task: str,
        span: Span,
        *,
        step: int,
        version: int,
        micro_batch: int | None = None,
        samples: Iterable[SampleId] = (),
    ) -> None:
        """`span` is of the worker's clock."""
        zero = self._zero + self._clock_offsets.get(worker, 0.0)
        names = tuple((sample.group, sample.sample) for sample in samples)
        start, end = span.start - zero, span.end - zero
        self._keep(Event(worker.group, worker.name, role, task, step + 1, micro_batch, version, start, end, worker.device, names))

    def _keep(self, event: Event) -> None:
        self._events.append(event)


def _clock_offsets(plan: RunPlan, clocks: Clocks) -> dict[Place, float]:
    offsets = {Place("rollout", plan.rollout_group, i): offset for i, offset in enumerate(clocks.engines)}
    offsets |= {Place("score", group, i): offset for group, some in clocks.scorers.items() for i, offset in enumerate(some)}
    for group, ranks in zip(plan.train_groups, clocks.trainers, strict=False):
        offsets |= {Place("train", group.group, rank): offset for rank, offset in enumerate(ranks)}
    return offsets
