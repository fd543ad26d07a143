"""report.html of a run: one file with its curves, its timeline and its numbers, readable without a network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from conveyor.report.gantt import draw_timeline
from conveyor.report.summary import Run, Sheet, metric_names, metrics_sheet, read_run, time_sheets
from conveyor.report.tables import cell

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

GANTT_STEPS = 3
DOTS = 90
"""Dots an inch."""

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}
img{max-width:100%}table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:1em;overflow:auto}"""


def write_report(folder: Path, step: int | None = None) -> Path:
    """Writes report.html, and timeline.png of a run with stages, from what the folder of a run holds; returns the page's path.

    Args:
        step: the step that the timeline shows, which is one of the run's; default: the last three.

    Raises:
        UserError: see `summary.read_run`.
    """
    return write_pages(read_run(folder), step)


def write_pages(run: Run, step: int | None = None) -> Path:
    """`write_report` of a run that is read already."""
    timeline = None
    if run.windows:
        timeline = _timeline(run, step)
        (run.folder / "timeline.png").write_bytes(timeline)
    path = run.folder / "report.html"
    path.write_text(_page(run, timeline, step), encoding="utf-8")
    return path


def _page(run: Run, timeline: bytes | None, step: int | None) -> str:
    name = html.escape(run.folder.resolve().name)
    parts = [f"<h1>{name}</h1>", f"<p>{len(run.metrics)} steps</p>", _picture(_png(_curves(run.metrics)), "curves of the metrics")]
    if timeline is not None:
        shown = f"Step {step}" if step is not None else f"The last {min(GANTT_STEPS, len(run.windows))} steps"
        parts += [f"<h2>Time</h2><p>{shown}: who did what when.</p>", _picture(timeline, "timeline")]
        parts += [_table(sheet) for sheet in time_sheets(run, step)]
    parts += ["<h2>Metrics</h2>", _table(metrics_sheet(run.metrics), heading=False)]
    if run.config:
        parts.append(f"<details><summary>Recipe</summary><pre>{html.escape(run.config)}</pre></details>")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    return "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts, "</body></html>", ""])


def _timeline(run: Run, step: int | None) -> bytes:
    last = dict(list(run.windows.items())[-GANTT_STEPS:]) if step is None else {step: run.windows[step]}
    ordered = list(last.values())
    return _png(draw_timeline(run.events, last, run.idle_causes((ordered[0][0], ordered[-1][1]))))


def _curves(rows: Sequence[dict[str, Any]]) -> Figure:
    names = metric_names(rows)
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


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float("nan") if row.get(name) is None else float(row[name]) for row in rows]


def _table(sheet: Sheet, heading: bool = True) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in sheet.columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell(value))}</td>" for value in row) + "</tr>" for row in sheet.rows)
    title = f"<h3>{html.escape(sheet.title)}</h3>" if heading else ""
    return f"{title}<table><tr>{head}</tr>\n{body}</table>"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS)
    return buffer.getvalue()


def _picture(png: bytes, description: str) -> str:
    return f'<img alt="{html.escape(description)}" src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'
