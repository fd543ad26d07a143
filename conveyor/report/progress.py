"""What a user sees of a run while it goes on, and the metrics it leaves behind."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conveyor.report.jsonl import read_objects


class MetricsLog:
    """metrics.jsonl: one object a step, readable as soon as it is written.

    JSON knows neither NaN nor infinity, and readers stumble over them: they are written as null.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. Raises ValueError naming file and line where a line is no JSON object."""
    return [row for _, row in read_objects(path)]


SHOWN = {"reward/mean": "reward", "kl": "kl", "loss": "loss", "accuracy": "accuracy",
         "eval/reward/mean": "held-out reward", "eval/loss": "held-out loss", "eval/accuracy": "held-out accuracy",
         "eval/rewards/accuracy": "held-out accuracy"}  # fmt: skip
"""Metric → its label in `summary`, where a step has it."""


def summary(row: Mapping[str, Any]) -> str:
    """A step's row in a few words: `reward 0.412 · kl 0.013 · 2,104 tokens/s · idle rollout 12% train 40%`."""
    words = [f"{label} {row[name]:.3g}" for name, label in SHOWN.items() if isinstance(row.get(name), int | float)]
    if isinstance(row.get("tokens_per_second"), int | float):
        words.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    idle = [f"{name.removeprefix('idle/')} {share:.0%}" for name, share in row.items() if name.startswith("idle/") and share is not None]
    if idle:
        words.append("idle " + " ".join(idle))
    return " · ".join(words)


class RunProgress:
    """A progress bar on stderr while it is a terminal; else one line at the start and one at the end.

    Legal order: enter, `ready` for each worker (methods with workers only), `step` for each step, exit.
    """

    def __init__(self, method: str, *, total: int, done: int = 0, unit: str = "steps", console: Console | None = None) -> None:
        """
        Args:
            total: steps of the whole run.
            done: steps that an earlier run has done already.
            unit: what is counted, of a command without steps.
        """
        self._method, self._total, self._done, self._unit = method, total, done, unit
        self._console = console or Console(stderr=True)
        self._last = ""
        self._workers = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[summary]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task(method, total=total, completed=done, summary="starting")

    def __enter__(self) -> RunProgress:
        self._began = time.monotonic()
        self._say(f"{self._method}: {self._total - self._done} {self._unit}")
        self._progress.start()
        return self

    def ready(self, worker: str) -> None:
        """A worker has loaded its models."""
        self._workers += 1
        self._progress.update(self._bar, summary=f"{self._workers} workers ready, last: {worker}")

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its line of metrics."""
        self._done += 1
        self._last = summary(row)
        self._progress.update(self._bar, completed=self._done, summary=self._last)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        seconds = time.monotonic() - self._began
        end = f"{self._method}: {self._done} of {self._total} {self._unit} in {seconds:.0f} s"
        stopped = f"{end}, interrupted" if kind is KeyboardInterrupt else f"{end}, ended by an error"
        self._say(stopped if kind else " · ".join(filter(None, [end, self._last])))

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
