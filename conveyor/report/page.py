"""report.html of a run: one file with its curves, its timeline and its numbers, readable without a network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from conveyor.config import UserError
from conveyor.report.events import Event, read_events
from conveyor.report.progress import read_metrics
from conveyor.report.tables import Cell, cell
from conveyor.report.timeline import Window, busy_bound, step_idle, step_windows

PANELS: dict[str, Callable[[str], bool]] = {
    "reward": lambda name: name.startswith("reward/") and name not in ("reward/timeouts", "reward/errors"),
    "KL to the reference (nats a token)": lambda name: name == "kl",
    "loss": lambda name: name in ("loss", "eval/loss") or name.startswith("loss/"),
    "accuracy": lambda name: name in ("accuracy", "eval/accuracy"),
    "response length (tokens)": lambda name: name == "response_length/mean",
    "share of tokens clipped, of samples truncated": lambda name: name in ("clip_fraction", "truncated_fraction"),
    "entropy (nats a token)": lambda name: name == "entropy",
    "idle share of a device group": lambda name: name.startswith("idle/"),
    "seconds a step": lambda name: name in ("time/step", "pipeline/bound"),
}
"""Title of a panel → which metrics it shows. A panel without any is left out."""

TASK_COLOURS = {
    "rollout": "#4c78a8", "score": "#f2a541", "prepare": "#b9b9b9", "train": "#54a24b", "update": "#2d6a27",
    "publish": "#b279a2", "install": "#7b4173", "checkpoint": "#9d755d",
}  # fmt: skip
OTHER_COLOUR = "#e45756"
GANTT_STEPS = 3

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
img{max-width:100%}table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:1em;overflow:auto}"""


def write_report(run: Path) -> Path:
    """Writes RUN/report.html from metrics.jsonl, events.jsonl and config.yaml (the last two where present); returns its path.

    Raises:
        UserError: the folder holds no metrics, or a line of a file cannot be read.
    """
    metrics_path, events_path, config_path = run / "metrics.jsonl", run / "events.jsonl", run / "config.yaml"
    if not metrics_path.is_file():
        raise UserError(f"{metrics_path}: not found; a report needs the folder of a run")
    try:
        rows = read_metrics(metrics_path)
        events = read_events(events_path) if events_path.is_file() else []
    except ValueError as error:
        raise UserError(str(error)) from error
    if not rows:
        raise UserError(f"{metrics_path}: no step has finished yet")
    config = config_path.read_text(encoding="utf-8") if config_path.is_file() else ""
    path = run / "report.html"
    path.write_text(_page(run.resolve().name, rows, events, config), encoding="utf-8")
    return path


def _page(name: str, rows: Sequence[dict[str, Any]], events: Sequence[Event], config: str) -> str:
    parts = [f"<h1>{html.escape(name)}</h1>", f"<p>{len(rows)} steps</p>", _picture(_curves(rows), "curves of the metrics")]
    windows = step_windows(events)
    if windows:
        last = list(windows.values())[-GANTT_STEPS:]
        window = (last[0][0], last[-1][1])
        parts += [f"<h2>Time</h2><p>The last {len(last)} steps: who did what when.</p>", _picture(_gantt(events, window), "timeline")]
        parts.append(_time_table(events, windows))
    parts += ["<h2>Metrics</h2>", _metrics_table(rows)]
    if config:
        parts.append(f"<details><summary>Recipe</summary><pre>{html.escape(config)}</pre></details>")
    head = f'<meta charset="utf-8"><title>{html.escape(name)}</title><style>{STYLE}</style>'
    return "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts, "</body></html>", ""])


def _metric_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every metric that is a number somewhere, in order of appearance."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    return [name for name in names if name != "step"]


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float("nan") if row.get(name) is None else float(row[name]) for row in rows]


def _curves(rows: Sequence[dict[str, Any]]) -> Figure:
    names = _metric_names(rows)
    panels = {title: [name for name in names if shows(name)] for title, shows in PANELS.items()}
    panels = {title: shown for title, shown in panels.items() if shown}
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4 * columns, 2.6 * lines), layout="constrained")
    steps = [row.get("step", number) for number, row in enumerate(rows, start=1)]
    for place, (title, shown) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(lines, columns, place)
        for name in shown:
            axes.plot(steps, _series(rows, name), label=name, linewidth=1.4, marker="." if len(rows) < 30 else None)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
        if len(shown) > 1:
            axes.legend(fontsize=7)
    return figure


def _gantt(events: Sequence[Event], window: Window) -> Figure:
    workers = sorted({(event.group, event.worker) for event in events})
    shown = [event for event in events if event.end > window[0] and event.start < window[1]]
    figure = Figure(figsize=(12, 0.9 + 0.35 * len(workers)), layout="constrained")
    axes = figure.add_subplot()
    tasks = sorted({event.task for event in shown}, key=lambda task: (task not in TASK_COLOURS, [*TASK_COLOURS, task].index(task)))
    for line, worker in enumerate(workers):
        for task in tasks:
            bars = [(e.start, e.end - e.start) for e in shown if (e.group, e.worker) == worker and e.task == task]
            # Samples overlap in an engine: the darker, the more of them.
            axes.broken_barh(bars, (line - 0.4, 0.8), color=_colour(task), alpha=0.25 if task == "rollout" else 0.9, linewidth=0)
    axes.set_yticks(range(len(workers)), [f"{worker} [{group}]" for group, worker in workers], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(*window)
    axes.set_xlabel("seconds since the run began", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.legend([Patch(color=_colour(task)) for task in tasks], tasks, fontsize=7, ncols=len(tasks) or 1, loc="lower right",
                bbox_to_anchor=(1, 1), frameon=False)  # fmt: skip
    return figure


def _colour(task: str) -> str:
    return TASK_COLOURS.get(task, OTHER_COLOUR)


def _time_table(events: Sequence[Event], windows: dict[int, Window]) -> str:
    """Idle shares and the bound over all finished steps."""
    ordered = list(windows.values())
    whole = (ordered[0][0], ordered[-1][1])
    bound = busy_bound(events, whole)
    rows: list[list[Cell]] = [[f"idle share of {group}", share] for group, share in step_idle(events, whole).items()]
    rows += [
        ["seconds, first prompt to last sync", whole[1] - whole[0]],
        [f"bound: {bound.group} busy, plus syncs (seconds)", bound.seconds],
        ["efficiency (bound / actual)", bound.efficiency],
    ]
    return _table(["all steps", ""], rows)


def _metrics_table(rows: Sequence[dict[str, Any]]) -> str:
    lines: list[list[Cell]] = []
    for name in _metric_names(rows):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        lines.append([name, values[0], values[-1], min(values), max(values), sum(values) / len(values)])
    return _table(["metric", "first", "last", "smallest", "largest", "mean"], lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _picture(figure: Figure, description: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}">'
