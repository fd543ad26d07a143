"""What an event waited for, read from the events alone.

    rollouts of its samples ─▶ score (each part), judge ─▶ prepare ─▶ train (each pass) ─▶ update ─▶ publish ─▶ install ─▶ rollout …

With dynamic sampling judging also says which groups are scored, and whether others are sampled in their place. An event also
waits for what its device did before, and for its stage's turn where stages never run at once: on a device group that holds
several, and everywhere with `pipeline.overlap: false`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from conveyor.report.events import JUDGE, Event, is_held_out
from conveyor.report.timeline import Interval, union

STAGE_OF_TASK = {
    "rollout": "rollout", "score": "score", JUDGE: "score", "prepare": "train", "train": "train", "update": "train", "publish": "train",
    "checkpoint": "train",
}  # fmt: skip
"""An install belongs to the stage of its worker. Without overlap judging takes its turn with the scoring."""

SAME_TIME = 0.01
"""Share of the busy time that stages may overlap and still count as taking turns: clocks agree only so far."""


class History:
    """The events of a run, looked up by what they belong to. An event is named by its index in `events`."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self._stage_of_worker: dict[str, str] = {}
        self._of_step: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._of_micro_batch: dict[tuple[str, int, int | None], list[int]] = defaultdict(list)
        self._of_sample: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._judged: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._samples: dict[tuple[int, int | None], set[tuple[int, int]]] = defaultdict(set)
        self._installs: dict[str, list[int]] = defaultdict(list)
        for index in sorted(range(len(events)), key=self.order):
            self._add(index, events[index])
        self._by_end: dict[str, list[int]] = defaultdict(list)
        for index in sorted(range(len(events)), key=lambda i: (events[i].end, self.order(i))):
            if events[index].task != JUDGE:
                self._by_end[events[index].place].append(index)
        self._deciding = self._judgings_that_decide()
        self._blockers: dict[int, int | None] = {}
        self._others = self._stages_that_exclude()

    def _add(self, index: int, event: Event) -> None:
        self._of_step[event.task, event.step].append(index)
        if event.task in STAGE_OF_TASK:
            self._stage_of_worker.setdefault(event.worker, STAGE_OF_TASK[event.task])
        if event.micro_batch is not None:
            self._of_micro_batch[event.task, event.step, event.micro_batch].append(index)
            self._samples[event.step, event.micro_batch].update(event.samples)
        if event.task == "rollout":
            for sample in event.samples:
                self._of_sample[sample].append(index)
        if event.task == JUDGE:
            for sample in event.samples:
                self._judged[sample].append(index)
        if event.task == "install":
            self._installs[event.worker].append(index)

    def order(self, index: int) -> tuple[float, int]:
        """Events in the order of their start. A cause comes before its effect."""
        return self.events[index].start, index

    def stage(self, event: Event) -> str:
        """rollout, score, train, or "" where nothing tells."""
        return STAGE_OF_TASK.get(event.task) or self._stage_of_worker.get(event.worker, "")

    def rollouts(self, step: int) -> list[int]:
        return self._of_step["rollout", step]

    # ── what an event needed ─────────────────────────────────────────────────────────────────────

    def inputs(self, index: int) -> list[int]:
        """Events whose results this one used."""
        event = self.events[index]
        match event.task:
            case "judge":
                found = [i for sample in event.samples for i in self._of_sample[sample]]
            case "score":
                judged = self._judgings(event)  # only of dynamic sampling does it wait for them
                found = self._sampled(event) + [i for i in judged if self.events[i].end <= event.start] + self._last_judged(event)
            case "prepare":
                found = self._scored(event) + self._judgings(event) + self._last_judged(event)
            case "train":
                prepared = self._of_micro_batch["prepare", event.step, event.micro_batch]
                own = [i for i in prepared if self.events[i].worker == event.worker]
                found = own or prepared or self._scored(event) + self._judgings(event)
            case "update":
                found = self._trained(index)
            case "publish":
                updates = self._of_role("update", event)
                own = [i for i in updates if self.events[i].worker == event.worker]
                found = self._last_before(index, own or updates)
            case "install":
                found = self._last_before(index, self._of_step["publish", event.step])
            case "rollout":
                found = self._last_before(index, self._installs[event.worker]) + self._last_judged(event)
            case _:
                found = []
        return [i for i in found if self.order(i) < self.order(index)]

    def _scored(self, event: Event) -> list[int]:
        """Score parts of a micro-batch; where there are none, its rollouts."""
        return self._of_micro_batch["score", event.step, event.micro_batch] or self._sampled(event)

    def _sampled(self, event: Event) -> list[int]:
        """Rollouts of a micro-batch; where no event names its samples, the step's last one that had ended."""
        samples = self._samples[event.step, event.micro_batch]
        if samples:
            return [i for sample in sorted(samples) for i in self._of_sample[sample]]
        ended = [i for i in self.rollouts(event.step) if self.events[i].end <= event.start]
        return [max(ended, key=lambda i: self.events[i].end)] if ended else []

    def _judgings(self, event: Event) -> list[int]:
        """The judging of a micro-batch's samples."""
        samples = self._samples[event.step, event.micro_batch]
        return [i for sample in sorted(samples) for i in self._judged[sample]]

    def _last_judged(self, event: Event) -> list[int]:
        """Where groups are dropped, what may start is decided when a sample is judged: the last judging to have ended."""
        ended = self._deciding
        place = bisect_right(ended, event.start, key=lambda i: self.events[i].end)
        return ended[max(0, place - 1) : place]

    def _judgings_that_decide(self) -> list[int]:
        """In the order of their end; none, unless the run has judged samples that it did not train."""
        trained = {sample for event in self.events if event.task == "prepare" for sample in event.samples}
        judged = [i for found in self._judged.values() for i in found if not is_held_out(self.events[i])]
        if not trained or all(sample in trained for i in judged for sample in self.events[i].samples):
            return []
        return sorted(judged, key=lambda i: (self.events[i].end, self.order(i)))

    def _trained(self, index: int) -> list[int]:
        """Micro-batches of an update, on every rank: those trained since the worker's last update."""
        event = self.events[index]
        updates = [i for i in self._of_role("update", event) if self.events[i].worker == event.worker]
        before = self._last_before(index, updates)
        since = self.events[before[0]].end if before else float("-inf")
        return [i for i in self._of_role("train", event) if self.events[i].start >= since]

    def _of_role(self, task: str, event: Event) -> list[int]:
        """Tasks of the same step and train group."""
        return [i for i in self._of_step[task, event.step] if self.events[i].role == event.role]

    def _last_before(self, index: int, candidates: Sequence[int]) -> list[int]:
        """The last of the candidates, which are in the order of their start, that began before the event; or none."""
        place = bisect_left(candidates, self.order(index), key=self.order)
        return list(candidates[place - 1 : place]) if place else []

    # ── what held an event up ────────────────────────────────────────────────────────────────────

    def blocker(self, index: int) -> int | None:
        """The last to end of what an event needed: its inputs, and the task before it on its device. (Judging has none.)"""
        if index not in self._blockers:
            held = self.inputs(index)
            ended = self._by_end[self.events[index].place] if self.events[index].task != JUDGE else []
            place = bisect_right(ended, self.events[index].start, key=lambda i: self.events[i].end)
            while place and self.order(ended[place - 1]) >= self.order(index):
                place -= 1
            held += ended[max(0, place - 1) : place]
            self._blockers[index] = max(held, key=lambda i: (self.events[i].end, self.order(i)), default=None)
        return self._blockers[index]

    def last_before(self, time: float) -> int | None:
        """The event that ended last by then."""
        ended = [i for i in range(len(self.events)) if self.events[i].end <= time and self.events[i].start < time]
        return max(ended, key=lambda i: (self.events[i].end, self.order(i)), default=None)

    def turns_of_others(self, event: Event) -> list[Interval]:
        """When other stages ran that never run at the same time as the event's."""
        return self._others.get((event.group, self.stage(event)), [])

    def _stages_that_exclude(self) -> dict[tuple[str, str], list[Interval]]:
        work: dict[tuple[str, str], list[Interval]] = defaultdict(list)
        for event in self.events:
            stage = self.stage(event)
            if stage and event.task != "prepare":  # needs no device
                work[event.group, stage].append((event.start, event.end))
        joined = {key: union(intervals) for key, intervals in work.items()}
        stages = {stage: union(piece for key, pieces in joined.items() if key[1] == stage for piece in pieces) for _, stage in joined}
        strict = len(stages) > 1 and _never_at_once(stages.values())
        return {
            key: union(
                piece for other, pieces in joined.items() if other[1] != key[1] and (strict or other[0] == key[0]) for piece in pieces
            )
            for key in joined
        }


def _never_at_once(timelines: Iterable[list[Interval]]) -> bool:
    """Whether the timelines hardly overlap."""
    lines = list(timelines)
    total = sum(end - start for line in lines for start, end in line)
    together = sum(end - start for start, end in union(piece for line in lines for piece in line))
    return total - together <= SAME_TIME * total
