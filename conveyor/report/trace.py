"""trace.json: a run in Chrome's trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A device group is a process, a worker a thread. Slices of one thread may not overlap, so where a worker does several things of one task at
once (samples in an engine, samples being judged), its thread shows from when to when it did any, and the single ones stand beside it as
asynchronous slices.
Arrows (flow events) lead from each slice to those that waited for its result: a micro-batch can be followed from its samples to the update
and, through the sync, to the next rollouts.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.report.events import JUDGE, Event
from conveyor.report.history import History
from conveyor.report.timeline import union, workers


@dataclass(slots=True)
class Slice:
    """A slice of a thread: one event, or several of one task that overlap. Times in whole microseconds."""

    events: list[int]
    start: int
    end: int
    process: int = 0
    thread: int = 0


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Writes the trace of a finished or a running run."""
    of_worker: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        of_worker[event.group, event.worker].append(index)
    order = workers(events)
    groups = {group: number for number, group in enumerate(dict.fromkeys(group for group, _ in order), start=1)}
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": group}} for group, pid in groups.items()
    ]
    threads = itertools.count(1)
    slices: list[Slice] = []
    for group, worker in order:
        own = of_worker[group, worker]
        for number, row in enumerate(_rows(events, own)):
            thread = next(threads)
            name = worker if number == 0 else f"{worker} ({number + 1})"
            trace.append({"ph": "M", "name": "thread_name", "pid": groups[group], "tid": thread, "args": {"name": name}})
            for piece in row:
                piece.process, piece.thread = groups[group], thread
                trace.append(_complete(events, piece))
            slices += row
        trace.extend({**piece, "pid": groups[group], "tid": thread} for piece in _concurrent(events, own))
    trace.extend(_arrows(events, slices))
    path.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}), encoding="utf-8")


# ── slices ───────────────────────────────────────────────────────────────────────────────────────


def _rows(events: Sequence[Event], own: Sequence[int]) -> list[list[Slice]]:
    """Slices of a worker in rows without overlap: nearly always one row."""
    slices = [
        piece for task in sorted({events[i].task for i in own}) for piece in _slices(events, [i for i in own if events[i].task == task])
    ]
    rows: list[list[Slice]] = []
    for piece in sorted(slices, key=lambda piece: (piece.start, piece.end)):
        free = next((row for row in rows if row[-1].end <= piece.start), None)
        if free is None:
            rows.append([piece])
        else:
            free.append(piece)
    return rows


def _slices(events: Sequence[Event], own: Sequence[int]) -> Iterator[Slice]:
    """Slices of one task of a worker: merged where its events overlap, unless none does."""
    ordered = sorted(own, key=lambda i: events[i].start)
    if not _overlap(events, own):
        yield from (_slice([i], events[i].start, events[i].end) for i in ordered)
        return
    for start, end in union((events[i].start, events[i].end) for i in own):
        count = bisect_right(ordered, end, key=lambda i: events[i].start)
        yield _slice(ordered[:count], start, end)
        del ordered[:count]


def _slice(inside: list[int], start: float, end: float) -> Slice:
    """At least a microsecond long, so that arrows find it."""
    return Slice(inside, _us(start), max(_us(end), _us(start) + 1))


def _overlap(events: Sequence[Event], own: Sequence[int]) -> bool:
    ordered = sorted((events[i].start, events[i].end) for i in own)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ordered))


def _complete(events: Sequence[Event], piece: Slice) -> dict[str, Any]:
    first = events[piece.events[0]]
    common = _common(first) if len(piece.events) == 1 else {"name": first.task, "cat": first.role, "args": {"count": len(piece.events)}}
    return {**common, "ph": "X", "ts": piece.start, "dur": piece.end - piece.start, "pid": piece.process, "tid": piece.thread}


def _concurrent(events: Sequence[Event], own: Sequence[int]) -> Iterator[dict[str, Any]]:
    for task in sorted({events[i].task for i in own}):
        of_task = [i for i in own if events[i].task == task]
        if not _overlap(events, of_task):
            continue
        for number, i in enumerate(of_task):
            common = {**_common(events[i]), "id2": {"local": f"{events[i].worker}/{task}/{number}"}}
            yield {**common, "ph": "b", "ts": _us(events[i].start)}
            yield {**common, "ph": "e", "ts": _us(events[i].end)}


def _common(event: Event) -> dict[str, Any]:
    args: dict[str, Any] = {"step": event.step, "micro_batch": event.micro_batch, "version": event.version}
    if len(event.samples) == 1:
        args["sample"] = "{}.{}".format(*event.samples[0])
    elif event.samples:
        args["samples"] = len(event.samples)
    return {"name": event.task, "cat": event.role, "args": {key: value for key, value in args.items() if value is not None}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


# ── arrows ───────────────────────────────────────────────────────────────────────────────────────


def _arrows(events: Sequence[Event], slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """For each (cause, effect) a start inside the cause's slice and an end inside the effect's, with an id of their own."""
    slice_of = {index: piece for piece in slices for index in piece.events}
    for number, (cause, effect) in enumerate(_causes_and_effects(events, slice_of), start=1):
        source, target = slice_of[cause], slice_of[effect]
        arrives = max(target.start, min(_us(events[effect].start), target.end - 1))
        leaves = max(source.start, min(_us(events[cause].end) - 1, source.end - 1, arrives))
        common = {"name": _what(events[cause], events[effect]), "cat": "flow", "id": number}
        yield {**common, "ph": "s", "ts": leaves, "pid": source.process, "tid": source.thread}
        yield {**common, "ph": "f", "bp": "e", "ts": arrives, "pid": target.process, "tid": target.thread}


def _causes_and_effects(events: Sequence[Event], slice_of: dict[int, Slice]) -> Iterator[tuple[int, int]]:
    """One pair for two slices: of samples merged in a slice the last that was waited for. Of a sync's many first
    rollouts the first. Ranks that trained together hand over to themselves. None leads from a sample to its judging: they
    would be as many as samples."""
    history = History(events)
    started: set[tuple[int, str]] = set()
    for effect in sorted(range(len(events)), key=history.order):
        event = events[effect]
        if event.task == JUDGE:
            continue
        causes = history.inputs(effect)
        own = [i for i in causes if events[i].worker == event.worker]
        last: dict[int, int] = {}
        for cause in sorted(own if own and event.task == "update" else causes, key=lambda i: events[i].end):
            last[id(slice_of[cause])] = cause
        for cause in last.values():
            if event.task == "rollout" and (cause, event.worker) in started:
                continue
            started.add((cause, event.worker))
            yield cause, effect


def _what(cause: Event, effect: Event) -> str:
    """What moves along an arrow."""
    if effect.micro_batch is not None or cause.micro_batch is not None:
        of = effect if effect.micro_batch is not None else cause
        return f"micro-batch {of.step}.{of.micro_batch}"
    return f"room in step {effect.step}" if cause.task == JUDGE else f"weights of step {cause.step}"
