"""The simulator against measurement: costs fitted to one run predict the others.

For each method the overlapped run at staleness 0 is the profile; the runs with overlap off and with staleness 1, and the profile's own
repetition, are predicted from its costs, their own recipes and the lengths they sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import overlap
from benchmarks.overlap import METHODS, MODES, run_folder
from benchmarks.results import Result, Say
from conveyor.plan.fit import fit, validate
from conveyor.plan.record import read_run

PREDICTED = (("off", 0), ("completion", 0), ("staleness1", 0))
"""(mode, repetition)"""


def run(folder: Path, say: Say) -> list[Result]:
    if not all((run_folder(folder, method, mode, 0) / "model").is_dir() for method in METHODS for mode in MODES):
        overlap.run(folder, say)
    details: dict[str, Any] = {}
    for method in METHODS:
        costs = fit(read_run(run_folder(folder, method, "on", 0)))
        for mode, repetition in PREDICTED:
            found = validate(read_run(run_folder(folder, method, mode, repetition)), costs)
            idle = {group: (found.predicted.idle[group], share) for group, share in found.measured.idle.items()}
            name = f"{method}, {mode}, repetition {repetition + 1}"
            details[name] = {
                "predicted_step_seconds": found.predicted.step_seconds, "measured_step_seconds": found.measured.step_seconds,
                "step_error": found.step_error, "idle_predicted_measured": idle,
            }  # fmt: skip
            shares = ", ".join(f"idle {group} {predicted:.3f} / {measured:.3f}" for group, (predicted, measured) in idle.items())
            seconds = f"{found.predicted.step_seconds:.2f} / {found.measured.step_seconds:.2f} s"
            say(f"{name}: predicted / measured step {seconds} ({found.step_error:+.1%}), {shares}")
    step = max(abs(of["step_error"]) for of in details.values())
    idle_error = max(abs(p - m) for of in details.values() for p, m in of["idle_predicted_measured"].values())
    what = f"largest of {len(details)} predicted runs"
    return [
        Result("simulator_step_time", f"simulator: error of the step time, {what}", step, 0.10, at_most=True, details={"runs": details}),
        Result("simulator_idle", f"simulator: error of an idle share, {what}", idle_error, 0.05, at_most=True),
    ]
