"""How much longer than its tasks a step takes: real Ray actors whose tasks sleep, against the simulator's ideal for the same times."""

from __future__ import annotations

from pathlib import Path

from benchmarks import sleepers
from benchmarks.results import Result, Say, median
from benchmarks.sleepers import Sleeps
from benchmarks.sleeping_runs import ENGINES, RANKS, SCORERS, Shape, ideal, local_ray, measured

SHAPE = Shape(steps=3, groups=32)
STAGES = 9.0
"""Seconds of rollout, score and train of a step together, each alone on all its devices."""
RATIOS = {"60:15:25": (0.60, 0.15, 0.25), "1:1:1": (1 / 3, 1 / 3, 1 / 3)}
SIGMAS = {"equal": 0.0, "lognormal": 0.5}
REPETITIONS = 2
UPDATE, PUBLISH, INSTALL = 0.05, 0.1, 0.1
"""Seconds."""


def sleeps_of(ratio: tuple[float, float, float], sigma: float, shape: Shape = SHAPE, total: float = STAGES) -> Sleeps:
    """Task times that make the stages of a step last `ratio` of `total` seconds, each alone (with equal lengths)."""
    rollout, score, train = (share * total for share in ratio)
    return Sleeps(
        shape.lengths(rollout / shape.waves, sigma), score * SCORERS / shape.micro_batches, train / shape.micro_batches,
        UPDATE, PUBLISH, INSTALL,
    )  # fmt: skip


def run(folder: Path, say: Say) -> list[Result]:
    cases = {f"{ratio}, {lengths}": sleeps_of(RATIOS[ratio], SIGMAS[lengths]) for ratio in RATIOS for lengths in SIGMAS}
    ideals = {name: _later(ideal(SHAPE, sleeps, folder / "sleepers")) for name, sleeps in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with local_ray():
        workers = sleepers.start(ENGINES, SCORERS, RANKS)
        measured(workers, Shape(1, 8), sleeps_of(RATIOS["1:1:1"], 0.0, Shape(1, 8), 1.0), folder / "sleepers")  # every process has started
        for repetition in range(REPETITIONS):
            for name, sleeps in cases.items():
                found = _later(measured(workers, SHAPE, sleeps, folder / "sleepers"))
                seconds[name].append(found)
                say(f"{name}, repetition {repetition + 1}: {found:.3f} s, ideal {ideals[name]:.3f} s")
    ratios = {name: median(found) / ideals[name] for name, found in seconds.items()}
    details = {"ideal_step_seconds": ideals, "step_seconds": seconds, "ratio": ratios, "micro_batches": SHAPE.micro_batches}
    what = f"step time / simulator's ideal, worst of {len(cases)} cases"
    return [Result("orchestration", what, max(ratios.values()), 1.03, at_most=True, details=details)]


def _later(steps: dict[int, float]) -> float:
    """Mean over the steps but the first."""
    kept = [seconds for step, seconds in steps.items() if step > 1]
    return sum(kept) / len(kept)
