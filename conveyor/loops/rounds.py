"""One round: its files, and how each is made of the one before.

policy r ─▶ samples.jsonl ─▶ selected.jsonl ─▶ train/ ─▶ policy r + 1
            pipeline/sampling   selection.py     offline/
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.config import LoopRecipe, UserError
from conveyor.loops.engines import LoopEngines
from conveyor.loops.fitting import fit_round
from conveyor.loops.round_metrics import round_metrics, samples_metrics
from conveyor.loops.samples_file import SamplesFile, read_lines
from conveyor.loops.selection import selected_rows
from conveyor.run_folder import RunFolder, write_lines
from conveyor.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundFolder:
    """Files of one round."""

    path: Path

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def held_out(self) -> Path:
        """Samples of the held-out prompts, by the policy that the round has trained; of round_0 by the first one."""
        return self.path / "held_out_samples.jsonl"

    @property
    def selected(self) -> Path:
        return self.path / "selected.jsonl"

    @property
    def train(self) -> Path:
        return self.path / "train"

    @property
    def model(self) -> Path:
        return self.train / "model"


@dataclass(frozen=True, slots=True)
class Loop:
    recipe: LoopRecipe
    run: RunFolder
    engines: LoopEngines
    held_out: Sequence[Prompt]

    def folder(self, number: int) -> RoundFolder:
        return RoundFolder(self.run.rounds / f"round_{number + 1}")

    def learnt(self, number: int) -> list[Path]:
        """selected.jsonl of each round that round `number` (from 0) learns from; none: it is skipped, and the policy stays as it is."""
        files = [self.folder(earlier).selected for earlier in range(0 if self.recipe.accumulates else number, number + 1)]
        return [file for file in files if file.stat().st_size]

    def trained(self, number: int) -> RoundFolder | None:
        """Of the first `number` rounds, which have selected, the newest that was not skipped."""
        return next((self.folder(earlier) for earlier in reversed(range(number)) if self.learnt(earlier)), None)

    def policy(self, number: int) -> str:
        """The one that `number` rounds have trained."""
        last = self.trained(number)
        if last is not None and not last.model.exists():
            raise UserError(f"checkpoint.resume: {last.model} is gone, and the rounds after it need it")
        return str(last.model) if last is not None else self.recipe.model.path

    def sampler(self, number: int) -> str:
        """The policy that samples in round `number` (from 0): the newest, or with staleness the one before."""
        return self.policy(max(0, number - self.recipe.rounds.max_staleness))

    def round(self, number: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """One round; returns its metrics."""
        sampled = self._sample(self.folder(number).samples, self.sampler(number), prompts)
        row = self.learn(number)
        if self.held_out:
            row |= self.evaluate(number + 1)
        return row | {"time/sample": sampled}

    def learn(self, number: int) -> dict[str, Any]:
        """Select from a round's samples and train; returns the round's metrics."""
        folder = self.folder(number)
        if not folder.selected.exists():
            write_lines(folder.selected, selected_rows(self.recipe, number, read_lines(folder.samples)))
        files = self.learnt(number)
        began = time.perf_counter()
        if files:
            self._fit(number, files)
        else:
            log.warning("round %d: nothing was selected of %s, so the policy stays as it is", number + 1, folder.samples)
        trained = time.perf_counter() - began
        row = round_metrics(self.recipe, number, folder.samples, folder.selected, files, folder.train)
        return row | {"time/train": trained}

    def _fit(self, number: int, files: Sequence[Path]) -> None:
        folder = self.folder(number)
        if not folder.model.exists():
            self.engines.rest()
            start = self.policy(number) if self.recipe.rounds.start_from == "previous" else self.recipe.model.path
            fit_round(self.recipe, files, start, self.sampler(number), folder.train)
        checkpoints = RunFolder(folder.train).checkpoints
        if checkpoints.exists():  # they were for the round to go on
            shutil.rmtree(checkpoints)

    def evaluate(self, rounds: int) -> dict[str, Any]:
        """Held-out metrics of the policy after so many rounds."""
        file = self.folder(rounds - 1).held_out
        self._sample(file, self.policy(rounds), self.held_out)
        return {f"eval/{name}": value for name, value in samples_metrics(self.recipe, file).items()}

    def _sample(self, file: Path, policy: str, prompts: Sequence[Prompt]) -> float:
        """Sample what the file has not yet; returns the seconds that took."""
        began = time.perf_counter()
        if not file.exists():
            samples = SamplesFile(file)
            done = samples.done()
            left = [prompt for prompt in prompts if prompt.index not in done]
            if left:
                with samples:
                    self.engines.sample(policy, left, samples.append)
            samples.complete()
        return time.perf_counter() - began
