"""Idle time by cause, from events alone.

While a device is idle, something keeps its next task from starting. From that task a chain of blockers leads back in time: the last to
end of what the task needed and what its device did before, the last to end of what *that* one waited for, and so on. Each moment of the
idle time falls on a link of this chain, and the link is the cause: had it been shorter, the device would have gone on earlier.

| cause               | the chain was at                                                                       |
|---------------------|----------------------------------------------------------------------------------------|
| waiting for rollout | samples being generated                                                                |
| longest samples     | the same when at most a tenth of the step's samples (or one) was left; for an engine:  |
|                     | samples of another engine                                                              |
| waiting for score   | scoring                                                                                |
| waiting for reward  | rewards that are functions or urls                                                     |
| waiting for train   | training: micro-batches, updates, checkpoints                                          |
| waiting for sync    | weights being published or installed                                                   |
| moving              | workers going to sleep, or waking, where stages leave a device's memory to one another |
| turns               | nothing: all was ready, but another stage had the device group (or, without overlap,   |
|                     | the run)                                                                               |
| evaluation          | held-out prompts (`evaluate.in_bubbles: false`)                                        |
| start-up            | its beginning: nothing came before                                                     |
| other               | nothing: between the end of a task and the start of the next (driver, network)         |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conveyor.report.events import EVALUATE, JUDGE, MOVES, Event, is_held_out
from conveyor.report.history import History
from conveyor.report.timeline import Interval, Window, clipped

CAUSES = (
    "waiting for rollout", "longest samples", "waiting for score", "waiting for reward", "waiting for train", "waiting for sync", "moving",
    "turns", "evaluation", "start-up", "other",
)  # fmt: skip
CAUSE_OF_TASK = {
    "score": "waiting for score", JUDGE: "waiting for reward", "prepare": "waiting for train", "train": "waiting for train",
    "update": "waiting for train", "checkpoint": "waiting for train", "publish": "waiting for sync", "install": "waiting for sync",
    EVALUATE: "evaluation", "sleep": "moving", "wake": "moving",
}  # fmt: skip

LEFT_OVER = 0.1
"""Share of a step's samples; when no more are left, they are its longest."""

Piece = tuple[float, float, str]
"""(start, end, cause)"""


@dataclass(frozen=True, slots=True)
class Idle:
    """A device was idle from `start` to `end` for one cause."""

    group: str
    place: str
    cause: str
    start: float
    end: float


def idle_spells(events: Sequence[Event], window: Window) -> list[Idle]:
    """Every idle moment of every device in the window, once. The devices are those of all events but judging, which takes none."""
    history = History(events)
    tails = _Tails(history)
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        if event.task != JUDGE:
            places[event.group, event.place].append(index)
    return [
        Idle(group, place, cause, start, end)
        for (group, place), own in sorted(places.items())
        for gap, following in _gaps(events, own, window)
        for start, end, cause in _explain(history, tails, gap, following, engine=_samples(history, own, following))
    ]


def idle_by_cause(spells: Sequence[Idle], window: Window, devices: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """group → cause → idle seconds of the window, averaged over the group's devices (`timeline.devices`): the causes of a group add up to
    its idle time."""
    seconds = {group: dict.fromkeys(CAUSES, 0.0) for group in sorted(devices)}
    for spell in spells:
        start, end = max(spell.start, window[0]), min(spell.end, window[1])
        if start < end:
            seconds[spell.group][spell.cause] += (end - start) / devices[spell.group]
    return seconds


class _Tails:
    """When the tail of each step begins: at most a tenth of its samples, or one, is still being sampled."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._begins: dict[int, float] = {}

    def begins(self, step: int) -> float:
        if step not in self._begins:
            ends = sorted(self._history.events[i].end for i in self._history.rollouts(step))
            left = max(1, int(len(ends) * LEFT_OVER))
            self._begins[step] = ends[-1 - left] if len(ends) > left else float("inf")
        return self._begins[step]


def _gaps(events: Sequence[Event], own: Sequence[int], window: Window) -> Iterator[tuple[Interval, int | None]]:
    """(idle interval, the event that ended it) of a device; None: it lasts to the window's end."""
    ordered = sorted(own, key=lambda i: (events[i].start, i))
    idle_from = window[0]
    for index in ordered:
        event = events[index]
        if event.task in MOVES:
            continue
        if event.start > idle_from:
            gap = (idle_from, min(event.start, window[1]))
            if gap[0] < gap[1]:
                yield gap, index
        idle_from = max(idle_from, event.end)
    if idle_from < window[1]:
        yield (idle_from, window[1]), None


def _samples(history: History, own: Sequence[int], following: int | None) -> bool:
    """Whether the device is an engine's: by what it does next, or else by what it did last."""
    return history.stage(history.events[own[-1] if following is None else following]) == "rollout"


def _explain(history: History, tails: _Tails, gap: Interval, following: int | None, *, engine: bool) -> Iterator[Piece]:
    """Cuts an idle interval into causes, walking back from the event that ended it. Without one, the device waits for
    whatever ends the window."""
    current = following
    cursor = gap[1] if following is None else history.events[following].start
    while cursor > gap[0]:
        blocker = history.last_before(cursor) if current is None else history.blocker(current)
        if blocker is None:
            yield from _cut((gap[0], cursor), gap, "start-up")
            return
        event = history.events[blocker]
        held = min(event.end, cursor)
        yield from _between(history, None if current is None else history.events[current], (held, cursor), gap)
        yield from _at(tails, event, (min(event.start, held), held), gap, own=engine)
        current, cursor = blocker, min(event.start, held)


def _between(history: History, waiting: Event | None, span: Interval, gap: Interval) -> Iterator[Piece]:
    """Everything was there, but the task had not begun."""
    span = (max(span[0], gap[0]), min(span[1], gap[1]))
    if span[0] >= span[1]:
        return
    turns = list(clipped(history.turns_of_others(waiting), span)) if waiting is not None else []
    edge = span[0]
    for start, end in turns:
        yield from _cut((edge, start), gap, "other")
        yield from _cut((start, end), gap, "turns")
        edge = end
    yield from _cut((edge, span[1]), gap, "other")


def _at(tails: _Tails, event: Event, span: Interval, gap: Interval, own: bool) -> Iterator[Piece]:
    """The chain was at an event. `own`: of the waiting device's own stage."""
    if is_held_out(event):
        yield from _cut(span, gap, CAUSE_OF_TASK[EVALUATE])
    elif event.task != "rollout":
        yield from _cut(span, gap, CAUSE_OF_TASK.get(event.task, "other"))
    elif own:
        yield from _cut(span, gap, "longest samples")
    else:
        tail = min(max(tails.begins(event.step), span[0]), span[1])
        yield from _cut((span[0], tail), gap, "waiting for rollout")
        yield from _cut((tail, span[1]), gap, "longest samples")


def _cut(span: Interval, gap: Interval, cause: str) -> Iterator[Piece]:
    start, end = max(span[0], gap[0]), min(span[1], gap[1])
    if start < end:
        yield start, end, cause
