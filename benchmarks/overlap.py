"""Real compute: the engine on one core, the trainer on another. Strictly one stage at a time, against overlap, against staleness 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.real_runs import Finished, real_runs
from benchmarks.results import Result, Say, median

MODES: dict[str, dict[str, Any]] = {
    "off": {"overlap": False},
    "on": {},
    "completion": {"order": "completion"},
    "staleness1": {"max_staleness": 1},
}
METHODS = ("ppo", "grpo")
REPETITIONS = 1
STEPS = 6
"""Of each run; the first two and the last are left out."""


def run_folder(folder: Path, method: str, mode: str, repetition: int) -> Path:
    return folder / "overlap" / f"{method}_{mode}_{repetition}"


def run(folder: Path, say: Say) -> list[Result]:
    found: dict[tuple[str, str], list[Finished]] = {(method, mode): [] for method in METHODS for mode in MODES}
    with real_runs(folder) as runs:
        for repetition in range(REPETITIONS):
            for method, mode in found:
                output = run_folder(folder, method, mode, repetition)
                finished = runs.go(workload.recipe(runs.inputs, output, method, STEPS, **MODES[mode]))
                found[method, mode].append(finished)
                work = ", ".join(f"{group} busy {seconds:.2f} s" for group, seconds in finished.busy_seconds.items())
                say(f"{method}, {mode}, repetition {repetition + 1}: step {finished.step_seconds:.2f} s, {work}")
    return [result for method in METHODS for result in _results(method, {mode: found[method, mode] for mode in MODES})]


def _results(method: str, found: dict[str, list[Finished]]) -> list[Result]:
    step = {mode: median([run.step_seconds for run in runs]) for mode, runs in found.items()}
    efficiency = median([run.bound.efficiency for run in found["staleness1"]])
    details = {
        "step_seconds": {mode: [run.step_seconds for run in runs] for mode, runs in found.items()},
        "busy_seconds": {mode: [run.busy_seconds for run in runs] for mode, runs in found.items()},
        "efficiency": {mode: [run.bound.efficiency for run in runs] for mode, runs in found.items()},
        "tokens_per_step": {mode: [run.tokens for run in runs] for mode, runs in found.items()},
    }
    name = method.upper()
    return [
        Result(f"overlap_{method}", f"{name}, staleness 0: times as fast as overlap off", step["off"] / step["on"], 1.25, details=details),
        Result(
            f"overlap_completion_{method}",
            f"{name}, staleness 0, completion order: times as fast as overlap off",
            step["off"] / step["completion"],
            1.25,
        ),
        Result(f"staleness_1_{method}", f"{name}, staleness 1: times as fast as overlap off", step["off"] / step["staleness1"], 1.6),
        Result(f"staleness_1_efficiency_{method}", f"{name}, staleness 1: bound / step time", efficiency, 0.9),
    ]
