"""timeline.png: who did what when, and what idle devices waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from conveyor.report.causes import CAUSES
from conveyor.report.events import EVALUATE, JUDGE, MOVES, Event
from conveyor.report.timeline import Interval, Window, clipped, covered, running, union, workers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASK_COLOURS = {
    "rollout": "#4c78a8", "score": "#f2a541", "prepare": "#a5a5a5", "train": "#54a24b", "update": "#1d5c1a", "publish": "#c977c0",
    "install": "#7b4173", "checkpoint": "#9d755d", EVALUATE: "#72b7b2", "sleep": "#b5b5b5", "wake": "#d9d9d9", JUDGE: "#d67195",
}  # fmt: skip
SAMPLED = ("rollout", EVALUATE)
"""Tasks of which an engine does many at once. (Of judging, functions and urls do many.)"""
OTHER_COLOUR = "#e45756"
CAUSE_COLOURS = dict(
    zip(
        CAUSES,
        ("#b8d0ea", "#f2a0a8", "#fbdcaa", "#f7c6d9", "#bfe0b4", "#d9bcdf", "#c9c9e8", "#d6c3a5", "#bfe3e0", "#f0f0f0", "#d0d0d0"),
        strict=True,
    )
)
BUSY_COLOUR = "#555555"
WIDTH = 13.0
"""Inches."""
LEGIBLE = 0.016
"""Share of the picture's width from which a bar has room for the number of its micro-batch."""
NARROW = 0.003
"""Share of the picture's width, about three dots."""


def draw_timeline(events: Sequence[Event], windows: Mapping[int, Window], idle: Mapping[str, Mapping[str, float]]) -> Figure:
    """A row for each worker, and below a bar for each device group.

    Engines are filled to the height of the samples they hold, relative to the most that one held at any time; so is the row of samples
    that functions and urls judge.

    Args:
        events: of the whole run, so that every worker has its row.
        windows: step → window, of the consecutive steps to show.
        idle: group → cause → seconds of these windows (`causes.idle_by_cause`).
    """
    ordered = list(windows.values())
    window = (ordered[0][0], ordered[-1][1])
    rows = workers(events)
    row_height = max(0.17, min(0.36, 11 / len(rows)))
    heights = [row_height * len(rows) + 0.3, 0.3 * len(idle) + 0.25]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.7), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _workers(above, events, rows, window)
    _steps(above, windows)
    _groups(below, idle, window[1] - window[0])
    return figure


# ── who did what when ────────────────────────────────────────────────────────────────────────────


def _workers(axes: Axes, events: Sequence[Event], rows: Sequence[tuple[str, str]], window: Window) -> None:
    of_worker: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        of_worker[event.group, event.worker].append(event)
    counts = {
        task: max((count for row in rows for _, count in running(of_worker[row], (task,))), default=0) or 1 for task in ("rollout", JUDGE)
    }
    shares, tasks = [], set()
    for line, row in enumerate(rows):
        own = of_worker[row]
        inside = [event for event in own if event.end > window[0] and event.start < window[1]]
        tasks |= {event.task for event in inside}
        if line % 2 == 0:
            axes.axhspan(line - 0.5, line + 0.5, color="#f6f6f6", zorder=0, linewidth=0)
        done = {event.task for event in own}
        filled = SAMPLED if "rollout" in done else (JUDGE,) if JUDGE in done else ()
        _samples(axes, inside, line, window, counts[filled[0]] if filled else 0, filled)
        _bars(axes, [event for event in inside if event.task not in filled], line, window)
        work = [(event.start, event.end) for event in own if event.task not in (JUDGE, *MOVES)]
        shares.append(f"{covered(work, window) / max(window[1] - window[0], 1e-9):.0%} busy" if work else "")
    for line in [n for n in range(1, len(rows)) if rows[n][0] != rows[n - 1][0]]:
        axes.axhline(line - 0.5, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [worker if group in worker.split() else f"{worker} [{group}]" for group, worker in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(*window)
    axes.set_xlabel("seconds since the run began", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(rows)), shares, fontsize=7)
    right.tick_params(length=0)
    named = [*(task for task in TASK_COLOURS if task in tasks), *sorted(tasks - set(TASK_COLOURS))]
    labels = [f"{task} (up to {counts[task]} samples)" if task in counts else task for task in named]
    assert axes.figure is not None
    above = axes.transAxes + ScaledTranslation(0, 0.28, axes.figure.dpi_scale_trans)  # inches: the steps' names stand between
    axes.legend([Patch(color=_colour(task)) for task in named], labels, fontsize=8, ncols=max(1, len(named)), loc="lower left",
                bbox_to_anchor=(0, 1), bbox_transform=above, frameon=False, borderaxespad=0)  # fmt: skip


def _samples(axes: Axes, events: Sequence[Event], line: int, window: Window, most: int, tasks: tuple[str, ...]) -> None:
    """The number of samples in an engine (or being judged), as the height of its row's filling: all, and in front those of all tasks
    but the last, …"""
    base, height = line + 0.42, 0.84
    for count in range(len(tasks), 0, -1):
        colour = _colour(tasks[count - 1])
        steps = running(events, tasks[:count])
        times = [min(max(time, window[0]), window[1]) for time, _ in steps]
        tops = [base - height * min(number / most, 1) for _, number in steps]
        axes.fill_between(times, tops, base, step="post", color=colour, linewidth=0, zorder=3 - count / 10)
        own = union((event.start, event.end) for event in events if event.task == tasks[count - 1])
        bars = [(start, end - start) for start, end in clipped(own, window)]
        axes.broken_barh(bars, (line - 0.42, height), color=colour, alpha=0.18, linewidth=0, zorder=1)


def _bars(axes: Axes, events: Sequence[Event], line: int, window: Window) -> None:
    length = window[1] - window[0]
    for task in sorted({event.task for event in events}):
        of_task = [event for event in events if event.task == task]
        bars: list[Interval] = [(event.start, event.end - event.start) for event in of_task]
        # The edge keeps neighbours apart, and tasks too short for that visible.
        edges = ["white" if long > NARROW * length else _colour(task) for _, long in bars]
        axes.broken_barh(bars, (line - 0.42, 0.84), facecolor=_colour(task), edgecolors=edges, linewidth=0.6, zorder=3)
        for event in of_task:
            if event.micro_batch is not None and task in ("score", "train") and event.end - event.start > LEGIBLE * length:
                middle = (max(event.start, window[0]) + min(event.end, window[1])) / 2
                axes.text(middle, line, str(event.micro_batch), ha="center", va="center", fontsize=7, color="white", zorder=4, clip_on=True)


def _steps(axes: Axes, windows: Mapping[int, Window]) -> None:
    for step, (start, end) in windows.items():
        axes.axvline(end, color="black", linewidth=0.9, linestyle=(0, (4, 3)), zorder=5)
        if end > start:
            axes.annotate(f"step {step} · {end - start:.3g} s", ((start + end) / 2, 1), (0, 3), xycoords=("data", "axes fraction"),
                          textcoords="offset points", ha="center", va="bottom", fontsize=8, annotation_clip=False)  # fmt: skip


# ── what idle devices waited for ─────────────────────────────────────────────────────────────────


def _groups(axes: Axes, idle: Mapping[str, Mapping[str, float]], length: float) -> None:
    """Shares of the time of a group's devices."""
    length = max(length, 1e-9)
    left = {group: 1 - sum(causes.values()) / length for group, causes in idle.items()}
    lines = range(len(idle))
    axes.barh(lines, list(left.values()), color=BUSY_COLOUR, height=0.7)
    _percent(axes, dict.fromkeys(idle, 0.0), left, "white")
    shown = ["busy"]
    for cause in CAUSES:
        shares = {group: causes[cause] / length for group, causes in idle.items()}
        if max(shares.values(), default=0.0) < 0.001:
            continue
        axes.barh(lines, list(shares.values()), left=list(left.values()), color=CAUSE_COLOURS[cause], height=0.7)
        _percent(axes, left, shares, "#333333")
        left = {group: left[group] + share for group, share in shares.items()}
        shown.append(cause)
    axes.set_yticks(lines, list(idle), fontsize=8)
    axes.set_ylim(len(idle) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    colours = {"busy": BUSY_COLOUR, **CAUSE_COLOURS}
    axes.legend([Patch(color=colours[name]) for name in shown], shown, fontsize=8, ncols=len(shown), loc="upper left",
                bbox_to_anchor=(0, -0.02), frameon=False, borderaxespad=0)  # fmt: skip
    axes.set_title("time of each group's devices: busy, and idle by cause", fontsize=8, loc="left")


def _percent(axes: Axes, left: Mapping[str, float], shares: Mapping[str, float], colour: str) -> None:
    for line, (group, share) in enumerate(shares.items()):
        if share >= 0.03:
            axes.text(left[group] + share / 2, line, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)


def _colour(task: str) -> str:
    return TASK_COLOURS.get(task, OTHER_COLOUR)
