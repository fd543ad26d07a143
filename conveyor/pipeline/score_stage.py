"""The score stage as the scheduler sees it: micro-batches on their way through parts and judging, and snapshots' versions. Pure.

sample ─▶ Judge (functions and urls, by sample) ─────────────┐
micro-batch ─▶ Score (each part, on its workers) ────────────┴─▶ ready to be prepared
                 snapshots and refreshed references: InstallSnapshot first, once their version is published
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from conveyor.pipeline.actions import InstallSnapshot, Judge, Score, ScoreEvaluation
from conveyor.pipeline.batching import MicroBatch
from conveyor.pipeline.run_plan import RunPlan, ScorePart
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey


class ScoreStage:
    """Legal order for a sample: `judge` (where the plan judges), `add` of its micro-batch and `judged`, in either order."""

    def __init__(self, plan: RunPlan, version: int) -> None:
        """version: the newest one published."""
        self.plan = plan
        self.micro_batches: dict[MicroBatchKey, MicroBatch] = {}
        """Those that are not ready."""
        self.to_judge: list[Judge] = []
        self._unjudged: dict[SampleId, MicroBatch | None] = {}
        """Samples that are being judged → the micro-batch that waits for it, if it is made already."""
        self._waiting: list[list[MicroBatchKey]] = [[] for _ in plan.parts]
        """Of each part, a heap: the oldest step first."""
        self._ready: list[MicroBatch] = []
        self._busy: set[tuple[str, int]] = set()
        """(device group, worker)"""
        self._versions = {
            (number, worker): self._first_version(part, version)
            for number, part in enumerate(plan.parts)
            if part.version(0) is not None
            for worker in range(plan.part_workers[number])
        }
        self.installing: dict[tuple[int, int], int] = {}
        """(part, worker) that holds an older version than it is to → which that is."""

    def _first_version(self, part: ScorePart, published: int) -> int:
        """What a part holds at the start. A reference that is refreshed holds the version its step asks for, which a resumed run
        reads from the checkpoint, unless it is the one that is published first."""
        start = self.plan.start_step
        return published if part.takes(start) else part.version(start) or 0

    # ── what is due ──────────────────────────────────────────────────────────────────────────────

    def due(self) -> Iterator[InstallSnapshot | Score]:
        for (part, worker), version in sorted(self.installing.items()):
            if (self.plan.parts[part].group, worker) not in self._busy:
                yield InstallSnapshot(part, worker, version)
        for part, waiting in enumerate(self._waiting):
            # The first in line is of the oldest step; while no snapshot fits it, none fits those behind it.
            wanted = self.plan.parts[part].version(waiting[0].step) if waiting else None
            for worker in self.free_workers(part) if waiting else ():
                if self._versions.get((part, worker)) == wanted:
                    yield Score(part, worker, waiting[0], self.micro_batches[waiting[0]].samples)
                    break

    def without_work(self) -> Iterator[int]:
        """Parts for which no micro-batch waits."""
        return (part for part, waiting in enumerate(self._waiting) if not waiting)

    def free_workers(self, part: int) -> Iterator[int]:
        group = self.plan.parts[part].group
        return (worker for worker in range(self.plan.part_workers[part]) if (group, worker) not in self._busy)

    def take_unjudged(self) -> list[Judge]:
        taken, self.to_judge = self.to_judge, []
        return taken

    def take_ready(self) -> list[MicroBatch]:
        """Micro-batches that every part is done with and whose samples are judged."""
        taken, self._ready = self._ready, []
        return taken

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def judge(self, sample: SampleId) -> None:
        """A sample has come that functions or urls are to be asked about."""
        self.to_judge.append(Judge(sample))
        self._unjudged[sample] = None

    def judged(self, sample: SampleId) -> None:
        waiting = self._unjudged.pop(sample)
        if waiting is not None:
            waiting.unjudged -= 1
            self._look_at(waiting)

    def add(self, micro_batch: MicroBatch) -> None:
        self.micro_batches[micro_batch.key] = micro_batch
        for sample in micro_batch.samples:
            if sample in self._unjudged:
                self._unjudged[sample] = micro_batch
                micro_batch.unjudged += 1
        for waiting in self._waiting:
            heapq.heappush(waiting, micro_batch.key)
        self._look_at(micro_batch)

    def published(self, version: int) -> None:
        """There is a newer version."""
        self.installing |= {place: version for place in self._versions if self.plan.parts[place[0]].takes(version)}

    def start(self, action: Score | InstallSnapshot | ScoreEvaluation) -> None:
        if isinstance(action, Score):
            heapq.heappop(self._waiting[action.part])
        self._busy.add((self.plan.parts[action.part].group, action.worker))

    def done(self, action: Score | InstallSnapshot | ScoreEvaluation) -> None:
        place = action.part, action.worker
        self._busy.discard((self.plan.parts[action.part].group, action.worker))
        match action:
            case Score():
                micro_batch = self.micro_batches[action.key]
                micro_batch.scored.add(action.part)
                self._look_at(micro_batch)
            case InstallSnapshot():
                self._versions[place] = action.version
                if self.installing[place] == action.version:
                    del self.installing[place]

    def _look_at(self, micro_batch: MicroBatch) -> None:
        if len(micro_batch.scored) == len(self.plan.parts) and not micro_batch.unjudged:
            self._ready.append(self.micro_batches.pop(micro_batch.key))
