"""What a benchmark says: a number, what it is to reach, and everything needed to judge it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from conveyor.report.tables import Cell, cell, table

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One number of the table."""

    name: str
    what: str
    """The number in words, with its unit."""
    value: float
    target: float
    at_most: bool = False
    """The target is an upper bound; else a lower one."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Every single measurement behind the number."""

    @property
    def holds(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def summary(self) -> dict[str, Any]:
        return {"value": self.value, "target": self.target, "holds": self.holds}


def machine() -> dict[str, Any]:
    """Where and under what load a benchmark is about to run."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(folder: Path, results: Sequence[Result], where: Mapping[str, Any], seconds: float) -> None:
    """Add the results to summary.json, details.json and table.md; those of benchmarks that did not run now stay."""
    added = {
        "summary.json": {result.name: result.summary for result in results},
        "details.json": {
            result.name: {"what": result.what, "at_most": result.at_most, "machine": dict(where), "seconds": seconds, **result.details}
            for result in results
        },
    }
    for name, entries in added.items():
        path = folder / name
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(before | entries, indent=2) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(folder), encoding="utf-8")


def markdown(folder: Path) -> str:
    """The table of docs/benchmarks.md, from summary.json and details.json."""
    summary, details = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("summary.json", "details.json"))
    lines = ["| number | measured | to reach | holds | load before |", "|---|---|---|---|---|"]
    for name, entry in summary.items():
        of = details[name]
        sign = "≤" if of["at_most"] else "≥"
        holds = "yes" if entry["holds"] else "**no**"
        lines.append(
            f"| {of['what']} | {cell(entry['value'])} | {sign} {entry['target']:,g} | {holds} | {of['machine']['load_before']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def show(results: Sequence[Result], console: Console) -> None:
    rows: list[list[Cell]] = [
        [result.what, result.value, f"{'≤' if result.at_most else '≥'} {result.target:,g}", "yes" if result.holds else "NO"]
        for result in results
    ]
    console.print(table("Benchmarks", ["", "measured", "to reach", "holds"], rows))


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
