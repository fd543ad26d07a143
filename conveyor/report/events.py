"""What happened when: one event for every action carried out, in a run or in a simulation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

from conveyor.report.jsonl import read_objects

SYNC_TASKS = frozenset({"publish", "install"})
"""Tasks that move weights; the others are work on samples or updates."""
JUDGE = "judge"
"""Task of rewards that are functions or urls: it takes no device, so it makes none busy or idle."""
MOVES = frozenset({"sleep", "wake"})
"""Tasks of workers that leave the memory of their device to another stage, or come back to it: the device is idle meanwhile."""
EVALUATE = "evaluate"
"""Task of sampling held-out prompts, and of scoring them: fills idle devices, and no step needs it."""


@dataclass(frozen=True, slots=True)
class Event:
    """A worker was busy with a task from `start` to `end`.

    Example: `Event("score", "score-0", "reward", "score", step=3, micro_batch=1, version=3, start=10.2, end=10.9)`.
    """

    group: str
    """Device group."""
    worker: str
    role: str
    """Role, or roles joined by +, that worked."""
    task: str
    """rollout, judge, score, prepare, train, update, publish, install, checkpoint, evaluate, sleep, wake, …"""
    step: int
    """From 1, as in metrics.jsonl."""
    micro_batch: int | None
    """Number within the step; None where the task is not about one."""
    version: int | None
    """Policy version used, or moved; None where none is."""
    start: float
    """Seconds since the run began."""
    end: float
    device: str | None = None
    """The device worked on, where several workers take turns on it; None: the worker has one of its own."""
    samples: tuple[tuple[int, int], ...] = ()
    """(prompt group, sample) of what was worked on: a rollout names its sample; a micro-batch is made of what its events name together."""

    @property
    def place(self) -> str:
        """What is busy during the event, and idle otherwise."""
        return self.device or self.worker


def is_held_out(event: Event) -> bool:
    """Of the judging of a held-out prompt's sample: their groups count down from −1."""
    return event.task == JUDGE and any(group < 0 for group, _ in event.samples)


FIELDS = tuple(field.name for field in fields(Event))


class EventLog:
    """Appends events to a file, one JSON object a line. `flush` (once a step) makes them visible to readers."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, event: Event) -> None:
        # Not dataclasses.asdict, which copies every value and took a seventh of the driver's time.
        self._file.write(json.dumps({name: getattr(event, name) for name in FIELDS}) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """The events of a file, of a finished or a running run. Raises ValueError naming file and line where a line is no event."""
    events = []
    for number, values in read_objects(path):
        try:
            samples = tuple((int(group), int(sample)) for group, sample in values.pop("samples", ()))
            events.append(_checked(Event(**values, samples=samples)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not an event ({error})") from error
    return events


def _checked(event: Event) -> Event:
    """Raises ValueError where a field is of another type."""
    for name in ("group", "worker", "role", "task"):
        if not isinstance(getattr(event, name), str):
            raise ValueError(f"{name} is no text")
    if type(event.step) is not int:
        raise ValueError("step is no whole number")
    for name in ("start", "end"):
        value = getattr(event, name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is no number")
    return event
