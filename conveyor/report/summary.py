"""A run in numbers: what `conveyor report` prints and report.html shows. No Ray, no pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from conveyor.config import UserError
from conveyor.report.causes import CAUSES, Idle, idle_by_cause, idle_spells
from conveyor.report.events import Event, read_events
from conveyor.report.progress import read_metrics
from conveyor.report.tables import Cell, cell
from conveyor.report.timeline import Window, busy, busy_bound, devices, occupancy, step_windows

STEPS_SHOWN = 20
NEGLIGIBLE = 0.0005
"""Share of the time below which a cause has no row: it would be shown as 0.0 %."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table that is not yet for a terminal or a page."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Run:
    """What a run's folder tells. `events` and `windows` are empty for methods without stages."""

    folder: Path
    metrics: list[dict[str, Any]]
    events: list[Event]
    config: str
    """The text of config.yaml, or nothing."""

    @cached_property
    def windows(self) -> dict[int, Window]:
        """step → window, of the steps whose metrics are written: a step that is going on has events too."""
        finished = {row.get("step") for row in self.metrics}
        return {step: window for step, window in step_windows(self.events).items() if step in finished}

    @cached_property
    def whole(self) -> Window:
        """From the first step's begin to the last one's end."""
        ordered = list(self.windows.values())
        return ordered[0][0], ordered[-1][1]

    @cached_property
    def idle(self) -> list[Idle]:
        """Every idle moment of the finished steps, and its cause."""
        return idle_spells(self.events, self.whole)

    def idle_causes(self, window: Window) -> dict[str, dict[str, float]]:
        """group → cause → seconds of the window, averaged over the group's devices."""
        return idle_by_cause(self.idle, window, devices(self.events))

    @property
    def finished(self) -> bool:
        """The model is saved last."""
        return (self.folder / "model").is_dir()

    @property
    def engine_slots(self) -> int | None:
        """`rollout.max_concurrent_requests` of its recipe."""
        recipe = yaml.safe_load(self.config) if self.config else None
        section = recipe.get("rollout") if isinstance(recipe, dict) else None
        slots = section.get("max_concurrent_requests") if isinstance(section, dict) else None
        return slots if isinstance(slots, int) else None


def read_run(folder: Path) -> Run:
    """Reads metrics.jsonl, events.jsonl and config.yaml (the last two where present) of a finished or a running run.

    Raises:
        UserError: the folder holds no run, no step of it has finished, or a line of a file cannot be read.
    """
    metrics_path, events_path, config_path = folder / "metrics.jsonl", folder / "events.jsonl", folder / "config.yaml"
    if not metrics_path.is_file():
        raise UserError(f"{metrics_path}: not found; a report needs the folder of a run")
    try:
        metrics = read_metrics(metrics_path)
        events = read_events(events_path) if events_path.is_file() else []
        config = read_config(config_path) if config_path.is_file() else ""
    except ValueError as error:
        raise UserError(str(error)) from error
    if not metrics:
        raise UserError(f"{metrics_path}: no step has finished yet")
    return Run(folder, metrics, events, config)


def read_config(path: Path) -> str:
    """The text of a config.yaml. Raises ValueError naming the file where it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
        yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())[:120]})") from None
    return text


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def time_sheets(run: Run, step: int | None = None) -> list[Sheet]:
    """Where the time went: step by step and over all, or in one step. Needs events."""
    window = run.whole if step is None else run.windows[step]
    title = "all steps" if step is None else f"step {step}"
    by_step = [steps_sheet(run), *causes_sheets(run)] if step is None else []
    return [*by_step, groups_sheet(run, window, title), bound_sheet(run, window, title), tasks_sheet(run.events, window, title)]


def steps_sheet(run: Run, shown: int = STEPS_SHOWN) -> Sheet:
    """A line for each of the last steps, and one for all."""
    groups = list(devices(run.events))
    columns = ["step", "seconds", "bound", "efficiency", "tokens/s", *(f"idle {group}" for group in groups)]
    tokens = {row.get("step"): row.get("tokens_per_second") for row in run.metrics}
    last = list(run.windows.items())[-shown:]
    rows = [_step_line(run, str(step), window, tokens.get(step), groups) for step, window in last]
    sampled = sum(row["tokens"] for row in run.metrics if row.get("step") in run.windows and isinstance(row.get("tokens"), int))
    seconds = run.whole[1] - run.whole[0]
    rows.append(_step_line(run, "all", run.whole, sampled / seconds if seconds > 0 else None, groups))
    return Sheet("Steps" + _last_of(run, shown), columns, rows)


def _step_line(run: Run, name: str, window: Window, tokens_per_second: float | None, groups: Sequence[str]) -> list[Cell]:
    length, bound = window[1] - window[0], busy_bound(run.events, window)
    causes = run.idle_causes(window)
    idle: list[Cell] = [_percent(sum(causes[group].values()), length) for group in groups]
    return [name, length, f"{cell(bound.seconds)} {bound.group}", f"{bound.efficiency:.0%}", tokens_per_second, *idle]


def causes_sheets(run: Run, shown: int = STEPS_SHOWN) -> list[Sheet]:
    """For each group, step by step: busy, and idle by cause. A line adds up to 100 %."""
    windows = [*((str(step), window) for step, window in list(run.windows.items())[-shown:]), ("all", run.whole)]
    causes = {name: run.idle_causes(window) for name, window in windows}
    sheets = []
    for group in devices(run.events):
        met = [cause for cause in CAUSES if any(causes[name][group][cause] > NEGLIGIBLE * (end - begin) for name, (begin, end) in windows)]
        rows: list[list[Cell]] = []
        for name, (begin, end) in windows:
            of, length = causes[name][group], end - begin
            rows.append([name, _percent(length - sum(of.values()), length), *(_percent(of[cause], length) for cause in met)])
        sheets.append(Sheet(f"Idle time of {group} by cause" + _last_of(run, shown), ["step", "busy", *met], rows))
    return sheets


def _last_of(run: Run, shown: int) -> str:
    return f" (the last {shown} of {len(run.windows)} steps)" if len(run.windows) > shown else ""


def groups_sheet(run: Run, window: Window, title: str) -> Sheet:
    """Each group's time: busy, and idle by cause. A column adds up to 100 %."""
    length = window[1] - window[0]
    work, causes = busy(run.events, window), run.idle_causes(window)
    groups = list(causes)
    rows: list[list[Cell]] = [["busy", *(_percent(work[group], length) for group in groups)]]
    for cause in CAUSES:
        if any(causes[group][cause] > NEGLIGIBLE * length for group in groups):
            rows.append([f"idle: {cause}", *(_percent(causes[group][cause], length) for group in groups)])
    held, slots = occupancy(run.events, window), run.engine_slots
    if held:
        mean = sum(held.values()) / len(held)
        text = f"{mean:.1f}" + (f" of {slots}" if slots else "")
        engines = {event.group for event in run.events if event.task == "rollout"}
        rows.append(["samples in an engine, mean", *(text if group in engines else None for group in groups)])
    return Sheet(f"Time of the devices, {title}", ["", *groups], rows)


def bound_sheet(run: Run, window: Window, title: str) -> Sheet:
    bound = busy_bound(run.events, window)
    rows: list[list[Cell]] = [
        ["seconds", window[1] - window[0]],
        [f"bound: {bound.group} busy, plus syncs (seconds)", bound.seconds],
        ["efficiency (bound / actual)", bound.efficiency],
    ]
    return Sheet(f"Bound, {title}", ["", ""], rows)


def tasks_sheet(events: Sequence[Event], window: Window, title: str) -> Sheet:
    """Every kind of task that ended in the window, and its longest one."""
    kinds: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if window[0] < event.end <= window[1]:
            kinds[event.task, event.role].append(event)
    rows: list[list[Cell]] = []
    for (task, role), of_kind in kinds.items():
        lengths = [event.end - event.start for event in of_kind]
        longest = max(of_kind, key=lambda event: event.end - event.start)
        of = f"step {longest.step}" if longest.micro_batch is None else f"micro-batch {longest.step}.{longest.micro_batch}"
        name = task if role in (task, "") else f"{task} ({role})"
        rows.append([name, len(lengths), sum(lengths), sum(lengths) / len(lengths), max(lengths), f"{longest.worker}, {of}"])
    return Sheet(f"Tasks, {title} (seconds)", ["task", "number", "total", "mean", "longest", "the longest one"], rows)


def metrics_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    lines: list[list[Cell]] = []
    for name in metric_names(rows):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        lines.append([name, values[0], values[-1], min(values), max(values), sum(values) / len(values)])
    return Sheet("Metrics", ["metric", "first", "last", "smallest", "largest", "mean"], lines)


def metric_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every metric that is a number somewhere, in order of appearance."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    return [name for name in names if name != "step"]


def _percent(seconds: float, length: float) -> str:
    return f"{seconds / length:.1%}" if length > 0 else "–"
