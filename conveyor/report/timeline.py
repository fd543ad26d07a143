"""Where the time went, from events alone: busy and idle shares, the bound, how full the engines were.

A *window* is an interval of the run's clock, (start, end) in seconds. The windows of a run's steps lie end to end: that
of a step runs from the end of the step before to its own, which is when its weights have arrived everywhere. So
work done early for a later step (staleness ≥ 1) is counted where the devices did it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from conveyor.report.events import EVALUATE, JUDGE, MOVES, SYNC_TASKS, Event

Window = tuple[float, float]
Interval = tuple[float, float]

STAGES = ("rollout", JUDGE, "score", "prepare", "train", "update")
STEP_ENDS_WITH = SYNC_TASKS | {"update"}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clipped(disjoint: Sequence[Interval], window: Window) -> Iterator[Interval]:
    """What of disjoint intervals in order lies in the window."""
    first = max(0, bisect_right(disjoint, window[0], key=lambda interval: interval[0]) - 1)
    for start, end in disjoint[first:]:
        if start >= window[1]:
            return
        if max(start, window[0]) < min(end, window[1]):
            yield max(start, window[0]), min(end, window[1])


def covered(intervals: Iterable[Interval], window: Window) -> float:
    """Seconds of the window in which at least one interval holds."""
    return sum(end - start for start, end in clipped(union(intervals), window))


def step_windows(events: Sequence[Event]) -> dict[int, Window]:
    """step → its window, for every step that has ended (with an update or a sync). The first begins with its first event."""
    ends: dict[int, float] = {}
    for event in events:
        if event.task in STEP_ENDS_WITH:
            ends[event.step] = max(event.end, ends.get(event.step, event.end))
    windows: dict[int, Window] = {}
    for step in sorted(ends):
        begins = windows[max(windows)][1] if windows else min(event.start for event in events if event.step == step)
        windows[step] = (begins, max(begins, ends[step]))
    return windows


def busy(events: Iterable[Event], window: Window, *, without: frozenset[str] = frozenset()) -> dict[str, float]:
    """group → seconds of the window in which its devices were busy with tasks not in `without`, averaged over its devices.

    A device is an event's `device`, or else its worker. Each that appears anywhere in `events` counts, busy in the window
    or not. Judging takes no device, and one that is handed over to another stage is not busy.
    """
    places: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.task == JUDGE:
            continue
        intervals = places[event.group][event.place]
        if event.task not in without | MOVES and event.end > window[0] and event.start < window[1]:
            intervals.append((event.start, event.end))
    return {
        group: sum(covered(intervals, window) for intervals in devices.values()) / len(devices) for group, devices in sorted(places.items())
    }


def devices(events: Iterable[Event]) -> dict[str, int]:
    """group → its devices that ever did anything."""
    places: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.task != JUDGE:
            places[event.group].add(event.place)
    return {group: len(places[group]) for group in sorted(places)}


def workers(events: Iterable[Event]) -> list[tuple[str, str]]:
    """(group, worker) in the order of the stages, numbered workers in the order of their numbers."""
    found: dict[tuple[str, str], int] = {}
    for event in events:
        key = (event.group, event.worker)
        found[key] = min(found.get(key, len(STAGES)), STAGES.index(event.task) if event.task in STAGES else len(STAGES))
    group_order = {group: min(place for (of, _), place in found.items() if of == group) for group, _ in found}

    def order(key: tuple[str, str]) -> tuple[int, str, int, list[tuple[int, str]]]:
        group, worker = key
        words = [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"[ .-]", worker)]
        return group_order[group], group, found[key], words

    return sorted(found, key=order)


def step_idle(events: Iterable[Event], window: Window) -> dict[str, float]:
    """group → share of the window in which its devices had nothing to do, 0 … 1."""
    length = window[1] - window[0]
    return {group: 1 - seconds / length if length > 0 else 0.0 for group, seconds in busy(events, window).items()}


@dataclass(frozen=True, slots=True)
class Bound:
    """How long a window had to be, had nobody waited for anyone."""

    seconds: float
    """Largest busy time of a group, without syncs and evaluation, plus the time of syncs."""
    group: str
    """The group that sets it."""
    efficiency: float
    """Bound / actual, 0 … 1: 1 = the slowest group never waited."""


def busy_bound(events: Sequence[Event], window: Window) -> Bound:
    """The bound of a window. Needs at least one event (ValueError)."""
    work = busy(events, window, without=SYNC_TASKS | {EVALUATE})
    if not work:
        raise ValueError("no events to take a bound from")
    group = max(work, key=lambda name: work[name])
    sync = covered(((event.start, event.end) for event in events if event.task in SYNC_TASKS), window)
    length = window[1] - window[0]
    # Work and a sync at the same time (in-flight update) would be counted twice.
    seconds = min(work[group] + sync, length)
    return Bound(seconds, group, seconds / length if length > 0 else 1.0)


def running(events: Iterable[Event], tasks: Collection[str] = ("rollout",)) -> list[tuple[float, int]]:
    """(time, how many events of the tasks run from then on), a step function in the order of time that ends with 0."""
    changes: dict[float, int] = defaultdict(int)
    for event in events:
        if event.task in tasks:
            changes[event.start] += 1
            changes[event.end] -= 1
    count, steps = 0, []
    for time in sorted(changes):
        count += changes[time]
        steps.append((time, count))
    return steps


def occupancy(events: Iterable[Event], window: Window) -> dict[str, float]:
    """Engine → samples it held at a time, averaged over the window."""
    seconds: dict[str, float] = {}
    for event in events:
        if event.task == "rollout":
            inside = max(0.0, min(event.end, window[1]) - max(event.start, window[0]))
            seconds[event.worker] = seconds.get(event.worker, 0.0) + inside
    length = window[1] - window[0]
    return {engine: total / length if length > 0 else 0.0 for engine, total in sorted(seconds.items())}
