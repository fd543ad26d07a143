"""`conveyor parity RECIPE`: the promise of exactness, tried on the user's own recipe.

The recipe runs a few steps twice, strictly one stage at a time and overlapped, from the same weights, prompts and seeds.
What came out is compared: samples, gradient of the first update, metrics of every step, parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conveyor.checks import check_online
from conveyor.config import OnlineRecipe, UserError, load_recipe, parse_recipe
from conveyor.pipeline.loop import run_online
from conveyor.report.progress import read_metrics
from conveyor.report.tables import Cell, table, wide_console
from conveyor.run_folder import RunFolder

STEPS = 3
PARAMETER_TOLERANCE = 1e-4
"""Relative, over the whole vector, after a few steps: what another order of the same float32 sums may do."""
GRADIENT_SHARE = 0.01
"""The gradient of the first update must agree this much better than the parameters."""
COMPARED = ("reward/mean", "kl", "loss/policy", "loss/value", "loss/kl", "grad_norm", "grad_norm/critic")


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two vectors."""

    relative: float
    """‖a − b‖ / ‖a‖"""
    largest: float
    """max |a − b|"""


@dataclass(frozen=True, slots=True)
class Parity:
    """What differs between overlap off and overlap on."""

    steps: int
    tolerance: float
    gradient: Difference
    """Of the first update, before clipping."""
    parameters: Difference
    """After the last step."""
    metrics: dict[str, float]
    """Name → largest absolute difference over the steps."""
    samples: int
    samples_differing: int
    seconds_off: float
    seconds_on: float
    """Median time of a step."""

    @property
    def holds(self) -> bool:
        return (
            self.parameters.relative <= self.tolerance
            and self.gradient.relative <= self.tolerance * GRADIENT_SHARE
            and self.samples_differing == 0
        )


def parity(recipe: OnlineRecipe, steps: int = STEPS, tolerance: float | None = None) -> Parity:
    """Run a recipe with overlap off and on and compare; everything is written under `output_dir`/parity.

    Args:
        tolerance: relative, of the parameters. Default: 0 where the same sums are added in the same order on CPU
            (`order: prompt`), else `PARAMETER_TOLERANCE`.
    """
    folder = Path(recipe.output_dir) / "parity"
    for name in ("off", "on"):
        check_online(_changed(recipe, folder / name, steps, overlap=name == "on"))
    (folder / "parity.json").unlink(missing_ok=True)
    if tolerance is None:
        exact = recipe.pipeline.order == "prompt" and not torch.cuda.is_available()
        tolerance = 0.0 if exact else PARAMETER_TOLERANCE
    off, on = (_run(recipe, folder / name, steps, overlap) for name, overlap in (("off", False), ("on", True)))
    found = compare(off, on, tolerance)
    (folder / "parity.json").write_text(json.dumps(asdict(found) | {"holds": found.holds}, indent=2) + "\n", encoding="utf-8")
    return found


def _run(recipe: OnlineRecipe, folder: Path, steps: int, overlap: bool) -> RunFolder:
    shutil.rmtree(folder / "gradient", ignore_errors=True)
    run_online(_changed(recipe, folder, steps, overlap), gradient_folder=folder / "gradient")
    return RunFolder(folder)


def _changed(recipe: OnlineRecipe, folder: Path, steps: int, overlap: bool) -> OnlineRecipe:
    """The recipe of one of the two runs, which replaces an earlier one of its folder."""
    raw = recipe.model_dump(mode="json")
    raw["output_dir"] = str(folder)
    raw["train"]["steps"] = steps
    raw["checkpoint"], raw["overwrite"] = {}, True
    raw["pipeline"] |= {"overlap": overlap, "max_staleness": 0}
    changed = parse_recipe(raw)
    assert isinstance(changed, OnlineRecipe)
    return changed


def compare(off: RunFolder, on: RunFolder, tolerance: float) -> Parity:
    """Two finished runs of one recipe."""
    rows_off, rows_on = read_metrics(off.metrics), read_metrics(on.metrics)
    samples = [[_sample(line) for line in run.samples.read_text(encoding="utf-8").split("\n") if line] for run in (off, on)]
    return Parity(
        steps=len(rows_off),
        tolerance=tolerance,
        gradient=_difference(off.path / "gradient", on.path / "gradient"),
        parameters=_difference(off.path, on.path, ("model", "critic")),
        metrics={name: _apart(rows_off, rows_on, name) for name in COMPARED if name in rows_off[0]},
        samples=len(samples[0]),
        samples_differing=sum(a != b for a, b in zip(*samples, strict=True)),
        seconds_off=median([row["time/step"] for row in rows_off]),
        seconds_on=median([row["time/step"] for row in rows_on]),
    )


def _sample(line: str) -> tuple[Any, ...]:
    row = json.loads(line)
    return row["step"], row["group"], row["sample"], row["response"]


def _difference(one: Path, other: Path, names: Sequence[str] = (".",)) -> Difference:
    squares = norm = largest = 0.0
    for name in names:
        a, b = _tensors(one / name), _tensors(other / name)
        assert a.keys() == b.keys(), "two runs of one recipe have the same tensors"
        for key, tensor in a.items():
            apart = tensor.double() - b[key].double()
            squares += apart.square().sum().item()
            norm += tensor.double().square().sum().item()
            largest = max(largest, apart.abs().max().item())
    return Difference((squares / norm) ** 0.5 if norm else squares**0.5, largest)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {f"{file.name}/{key}": tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def _apart(one: list[dict[str, Any]], other: list[dict[str, Any]], name: str) -> float:
    return max(abs((a[name] or 0.0) - (b[name] or 0.0)) for a, b in zip(one, other, strict=True))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Any key of the recipe can be set too: --dotted.key value."
    parser.add_argument("recipe", help="YAML file of an online method")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each of the two runs; default: %(default)s")
    parser.add_argument(
        "--tolerance", type=float, help="relative difference of the parameters; default: 0 with order: prompt on a CPU, else 1e-4"
    )


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Exit status 0 where both runs agree within the tolerance, else 1."""
    recipe = load_recipe(known.recipe, overrides)
    if not isinstance(recipe, OnlineRecipe):
        raise UserError(f"{known.recipe}: method: {recipe.method} has no stages to overlap; parity is for online methods")
    if known.steps < 1:
        raise UserError(f"--steps: {known.steps}: must be 1 or more")
    if known.tolerance is not None and not 0 <= known.tolerance < math.inf:
        raise UserError(f"--tolerance: {known.tolerance:g}: must be 0 or more")
    if recipe.pipeline.max_staleness:
        print("pipeline.max_staleness: both runs use 0; with more, sampling ahead changes the samples by design", file=sys.stderr)
    found = parity(recipe, known.steps, known.tolerance)
    _print(found)
    return 0 if found.holds else 1


def _print(found: Parity) -> None:
    rows: list[list[Cell]] = [
        ["parameters after the last step", found.parameters.relative, found.parameters.largest],
        ["gradient of the first update", found.gradient.relative, found.gradient.largest],
        *([name, None, apart] for name, apart in found.metrics.items()),
    ]
    console = wide_console()
    console.print(table(f"Overlap on against off, {found.steps} steps", ["", "relative", "largest"], rows))
    console.print(f"{found.samples_differing} of {found.samples} samples differ", highlight=False)
    console.print(f"median step: {found.seconds_off:.2f} s off, {found.seconds_on:.2f} s on", highlight=False)
    exact = found.parameters.largest == found.gradient.largest == 0 and not any(found.metrics.values())
    verdict = "equal, bit for bit" if exact else f"{'within' if found.holds else 'PAST'} the tolerance of {found.tolerance:g}"
    console.print(verdict, highlight=False)
