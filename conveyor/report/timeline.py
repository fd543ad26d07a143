"""Where the time went, from events alone: busy and idle shares, the bound, a trace for Perfetto.

A *window* is an interval of the run's clock, (start, end) in seconds. The windows of a run's steps lie end to end: that
of a step runs from the end of the step before to its own, which is when its weights have arrived everywhere. So
work done early for a later step (staleness ≥ 1) is counted where the devices did it.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.report.events import SYNC_TASKS, Event

Window = tuple[float, float]
Interval = tuple[float, float]

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


def covered(intervals: Iterable[Interval], window: Window) -> float:
    """Seconds of the window in which at least one interval holds."""
    clipped = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return sum(end - start for start, end in union((start, end) for start, end in clipped if start < end))


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
    or not.
    """
    places: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        intervals = places[event.group][event.place]
        if event.task not in without:
            intervals.append((event.start, event.end))
    return {
        group: sum(covered(intervals, window) for intervals in devices.values()) / len(devices) for group, devices in sorted(places.items())
    }


def step_idle(events: Iterable[Event], window: Window) -> dict[str, float]:
    """group → share of the window in which its devices had nothing to do, 0 … 1."""
    length = window[1] - window[0]
    return {group: 1 - seconds / length if length > 0 else 0.0 for group, seconds in busy(events, window).items()}


@dataclass(frozen=True, slots=True)
class Bound:
    """How long a window had to be, had nobody waited for anyone."""

    seconds: float
    """Largest busy time of a group, without syncs, plus the time of syncs."""
    group: str
    """The group that sets it."""
    efficiency: float
    """Bound / actual, 0 … 1: 1 = the slowest group never waited."""


def busy_bound(events: Sequence[Event], window: Window) -> Bound:
    """The bound of a window. Needs at least one event (ValueError)."""
    work = busy(events, window, without=SYNC_TASKS)
    if not work:
        raise ValueError("no events to take a bound from")
    group = max(work, key=lambda name: work[name])
    sync = covered(((event.start, event.end) for event in events if event.task in SYNC_TASKS), window)
    length = window[1] - window[0]
    # Work and a sync at the same time (in-flight update) would be counted twice.
    seconds = min(work[group] + sync, length)
    return Bound(seconds, group, seconds / length if length > 0 else 1.0)


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Writes a trace in Chrome's format; opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

    A device group is a process, a worker a thread. Slices of one thread may not overlap, so where a worker does several
    things of one task at once (samples in an engine), its thread shows from when to when it did any, and the single ones
    stand beside it as asynchronous slices.
    """
    groups = {group: number for number, group in enumerate(sorted({event.group for event in events}), start=1)}
    workers: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        workers[event.group, event.worker].append(event)
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": group}} for group, pid in groups.items()
    ]
    thread = 0
    for (group, worker), own in sorted(workers.items()):
        rows = _rows(own)
        for number, slices in enumerate(rows):
            thread += 1
            name = worker if number == 0 else f"{worker} ({number + 1})"
            trace.append({"ph": "M", "name": "thread_name", "pid": groups[group], "tid": thread, "args": {"name": name}})
            trace.extend({**piece, "pid": groups[group], "tid": thread} for piece in slices)
        trace.extend({**piece, "pid": groups[group], "tid": thread} for piece in _concurrent(own))
    path.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}), encoding="utf-8")


def _rows(events: Sequence[Event]) -> list[list[dict[str, Any]]]:
    """Slices of a worker in rows without overlap: nearly always one row."""
    slices = [piece for task in sorted({event.task for event in events}) for piece in _slices([e for e in events if e.task == task])]
    rows: list[list[dict[str, Any]]] = []
    for piece in sorted(slices, key=lambda piece: (piece["ts"], piece["dur"])):
        free = next((row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= piece["ts"]), None)
        if free is None:
            rows.append([piece])
        else:
            free.append(piece)
    return rows


def _overlap(events: Sequence[Event]) -> bool:
    ordered = sorted((event.start, event.end) for event in events)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ordered))


def _slices(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Complete slices of one task of a worker; merged where its events overlap."""
    if not _overlap(events):
        yield from ({**_common(event), "ph": "X", "ts": _us(event.start), "dur": _us(event.end) - _us(event.start)} for event in events)
        return
    for start, end in union((event.start, event.end) for event in events):
        inside = sum(start <= event.start <= end for event in events)
        common = {"name": events[0].task, "cat": events[0].role, "args": {"count": inside}}
        yield {**common, "ph": "X", "ts": _us(start), "dur": _us(end) - _us(start)}


def _concurrent(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for task in sorted({event.task for event in events}):
        of_task = [event for event in events if event.task == task]
        if not _overlap(of_task):
            continue
        for number, event in enumerate(of_task):
            common = {**_common(event), "id2": {"local": f"{event.worker}/{task}/{number}"}}
            yield {**common, "ph": "b", "ts": _us(event.start)}
            yield {**common, "ph": "e", "ts": _us(event.end)}


def _common(event: Event) -> dict[str, Any]:
    args = {"step": event.step, "micro_batch": event.micro_batch, "version": event.version}
    return {"name": event.task, "cat": event.role, "args": {key: value for key, value in args.items() if value is not None}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
