"""What `conveyor generate` and `conveyor score` share: prompts go through a `Sampler`, and their rows to a `RowStore`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from conveyor.checks import devices_per_worker, planned_devices
from conveyor.config import OnlineRecipe, UserError, sections
from conveyor.pipeline.row_store import NAMES, RowStore
from conveyor.pipeline.sampling import Sampled, Sampler
from conveyor.report.progress import RunProgress
from conveyor.report.tables import table
from conveyor.run_folder import RunFolder, is_filled
from conveyor.types import Prompt
from conveyor.workers.placement import Placement

OF_A_RUN = ("metrics.jsonl", "trace.json", "report.html", "model", "critic", "checkpoints", "evaluation.json")


def add_arguments(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument("--output-dir", help=f"default: {folder}")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the file; default: %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever an earlier command has finished")


def open_store(recipe: OnlineRecipe, name: str, settings: dict[str, Any], *, overwrite: bool) -> RowStore:
    """The rows of a command, with what it has finished before; the folder is this process's until it ends.

    Raises:
        UserError: the folder holds a run, or rows that were made with other settings.
    """
    folder = Path(recipe.output_dir)
    if of_a_run := [made for made in OF_A_RUN if is_filled(folder / made)]:
        raise UserError(f"--output-dir: {folder} holds a run ({of_a_run[0]}); name another folder")
    others = [RowStore(folder, other) for other in NAMES if other != name]
    if of_others := [other.complete or folder for other in others if other.complete or other.begun]:
        raise UserError(f"--output-dir: {of_others[0]} is of another command; name another folder")
    store = RowStore(folder, name)
    if not overwrite:
        store.check(settings)
    goes_on = store.begun and not overwrite
    RunFolder.open(recipe.model_copy(update={"checkpoint": sections.Checkpoint(resume=goes_on)}))
    store.open(settings)
    return store


def sample_rows(
    what: str,
    recipe: OnlineRecipe,
    prompts: Sequence[Prompt],
    store: RowStore,
    to_rows: Callable[[Sampled], list[dict[str, Any]]],
    *,
    replay: bool = False,
) -> float:
    """Sample and score the prompts whose rows are not there; `to_rows` makes a prompt's. Returns sampled tokens a second.

    Args:
        what: the command, for the progress bar.
        replay: see `Sampler`.
    """
    left = [prompt for prompt in prompts if prompt.index not in store.done]
    if not left:
        return 0.0
    sizes, passed = devices_per_worker(recipe), Passed()
    with (
        RunProgress(what, total=len(prompts), done=len(prompts) - len(left), unit="rows" if replay else "prompts") as progress,
        Placement.create(planned_devices(recipe), recipe.ray, telemetry=recipe.telemetry, devices_per_worker=sizes) as placement,
        Sampler(recipe, placement, replay=replay, on_ready=progress.ready) as sampler,
    ):

        def keep(sampled: Sampled) -> None:
            store.append(sampled.prompt.index, to_rows(sampled))
            passed.add(sampled)
            progress.step(passed.line())

        passed.began = time.monotonic()
        sampler.sample(left, keep)
        return passed.speed()


@dataclass
class Passed:
    """Sums over what this process has sampled and scored."""

    began: float = 0.0
    tokens: int = 0
    scores: float = 0.0
    scored: int = 0

    def add(self, sampled: Sampled) -> None:
        self.tokens += sum(int(rollout.sampled_mask.sum()) for rollout in sampled.rollouts)
        known = [score for score in sampled.scores if score is not None]
        self.scores, self.scored = self.scores + sum(known), self.scored + len(known)

    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(time.monotonic() - self.began, 1e-9)

    def line(self) -> dict[str, float]:
        reward = {"reward/mean": self.scores / self.scored} if self.scored else {}
        return reward | {"tokens_per_second": self.speed()}


def print_summary(title: str, values: dict[str, Any], file: Path) -> None:
    Console().print(table(title, ["", "value"], [[name, value] for name, value in values.items()]))
    print(file)
