"""The folder of a run: where everything a run writes goes, and how it is complete or absent.

config.yaml  metrics.jsonl  events.jsonl  samples.jsonl  checkpoints/step_N/  model/  trace.json  report.html
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from conveyor.config import OfflineRecipe, OnlineRecipe, UserError

MADE_BY_A_RUN = (
    "config.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "trace.json",
    "report.html",
    "checkpoints",
    "model",
    "critic",
)


class RunFolder:
    """Paths and rules of one run's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.trace = self.path / "trace.json"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.critic = self.path / "critic"

    @classmethod
    def check(cls, recipe: OnlineRecipe | OfflineRecipe) -> RunFolder:
        """The folder a recipe may write to; changes nothing.

        Raises:
            UserError: it holds a run that the recipe neither resumes nor overwrites, or is a file.
        """
        folder = cls(recipe.output_dir)
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"output_dir: {folder.path} is a file")
        holds_run = folder.config.exists() or folder.metrics.exists()
        if holds_run and not (recipe.overwrite or recipe.checkpoint.resume):
            raise UserError(f"output_dir: {folder.path} already holds a run; set checkpoint.resume or overwrite, or name another folder")
        return folder

    @classmethod
    def open(cls, recipe: OnlineRecipe | OfflineRecipe) -> RunFolder:
        """`check`, then make the folder ready: emptied of an older run unless resumed, resolved recipe written."""
        folder = cls.check(recipe)
        folder.path.mkdir(parents=True, exist_ok=True)
        if not recipe.checkpoint.resume:
            for name in MADE_BY_A_RUN:
                _remove(folder.path / name)
        for left_over in folder.checkpoints.glob(".step_*"):
            _remove(left_over)
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        folder.config.write_text(text, encoding="utf-8")
        return folder

    def newest_checkpoint(self) -> tuple[int, Path] | None:
        """(steps done, folder) of the newest complete checkpoint."""
        found = self._checkpoints()
        return found[-1] if found else None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        if not self.checkpoints.is_dir():
            return []
        named = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in self.checkpoints.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match)

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step` steps: a resumed run does it again."""
        for path, kept in ((self.metrics, step), (self.samples, step), (self.events, step - 1)):
            if path.exists():
                lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if _step(line, kept + 1) <= kept]
                aside = path.with_name(f".{path.name}.partial")
                aside.write_text("".join(lines), encoding="utf-8")
                os.replace(aside, path)

    def begin_checkpoint(self, step: int) -> Path:
        """A folder to write a checkpoint to, under a name that `newest_checkpoint` does not see."""
        aside = self.checkpoints / f".step_{step}.partial"
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def commit_checkpoint(self, step: int, keep: int) -> Path:
        """Everything is written: give the checkpoint its name, and remove all but the newest `keep`."""
        final = self.checkpoints / f"step_{step}"
        _remove(final)
        os.rename(self.begin_checkpoint(step), final)
        for _, path in self._checkpoints()[:-keep]:
            shutil.rmtree(path)
        return final


@contextmanager
def complete_or_absent(path: Path) -> Iterator[Path]:
    """Yields a folder beside `path`; it becomes `path`, replacing an older one, only when the block ends well."""
    aside, older = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    _remove(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        _remove(aside)
        raise
    _remove(older)
    if path.exists():
        os.rename(path, older)
    os.rename(aside, path)
    _remove(older)


def _step(line: str, otherwise: int) -> int:
    """The step a log line is of; a line cut short by a kill belongs to none."""
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return otherwise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
