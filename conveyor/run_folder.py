"""The folder of a run: where everything a run writes goes, and how it is complete or absent.

config.yaml  metrics.jsonl  events.jsonl  samples.jsonl  checkpoints/step_N/  model/  trace.json  timeline.png  report.html
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
import yaml

from conveyor.config import LoopRecipe, Recipe, UserError

COMPLETE = "complete"
"""An empty file, written last, that says a checkpoint is whole."""
MADE_BY_A_RUN = (
    "config.yaml",
    "data.json",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "trace.json",
    "timeline.png",
    "report.html",
    "checkpoints",
    "model",
    "critic",
    "adapter",
    "reference_logprobs",
    "rounds",
    "rewards.log",
    "evaluations.jsonl",
    "held_out_samples.jsonl",
    "evaluation.json",
    *(f"{rows}.{part}" for rows in ("samples", "scores") for part in ("parquet", "partial.jsonl", "settings.json")),
    "scores.jsonl",
)
HOLDS_RESULTS = (
    "samples.jsonl", "metrics.jsonl", "trace.json", "report.html", "model", "critic", "rounds",
    "samples.parquet", "samples.partial.jsonl", "scores.jsonl", "scores.parquet", "scores.partial.jsonl",
)  # fmt: skip
"""Names of `MADE_BY_A_RUN` that are kept from being replaced; a run that ended before its first step has none of them filled."""

_CLAIMED: dict[tuple[int, int], int] = {}
"""Folders (device, inode) that this process holds, and the open descriptor that holds each."""


class RunFolder:
    """Paths and rules of one run's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.data = self.path / "data.json"
        """What was in the data files, so that a resumed run goes on with the same."""
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.held_out_samples = self.path / "held_out_samples.jsonl"
        self.trace = self.path / "trace.json"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.critic = self.path / "critic"
        self.rounds = self.path / "rounds"
        self.adapter = self.path / "adapter"
        self.reference_logprobs = self.path / "reference_logprobs"
        self.rewards_log = self.path / "rewards.log"

    @classmethod
    def check(cls, recipe: Recipe) -> RunFolder:
        """The folder a recipe may write to; changes nothing.

        Raises:
            UserError: it cannot be written to, or holds what a run has made and the recipe neither resumes
                nor overwrites, or something that the recipe reads; or the run to resume had another recipe.
        """
        folder = cls(recipe.output_dir)
        check_writable(folder.path, recipe.output_dir)
        made = [name for name in HOLDS_RESULTS if is_filled(folder.path / name)]
        if folder.newest_checkpoint() is not None:
            made.append("checkpoints")
        if made and not (recipe.overwrite or recipe.checkpoint.resume):
            holds = "already holds a run" if folder.config.exists() or "metrics.jsonl" in made else f"already holds {made[0]}"
            raise UserError(f"output_dir: {folder.path} {holds}; set checkpoint.resume or overwrite, or name another folder")
        for key, source in _inputs(recipe.model_dump(mode="json")):
            if any(Path(source).resolve().is_relative_to((folder.path / name).resolve()) for name in MADE_BY_A_RUN):
                raise UserError(f"{key}: {source} lies where the run writes (output_dir: {folder.path})")
        left = folder.newest_checkpoint() is not None or is_filled(folder.rounds)
        if recipe.checkpoint.resume and folder.config.exists() and left:
            _check_resumed(folder, recipe)
        return folder

    @classmethod
    def open(cls, recipe: Recipe) -> RunFolder:
        """`check`, then make the folder ready: emptied of an older run unless resumed, resolved recipe written.

        Raises:
            UserError: as `check`, or another run is writing to the folder.
        """
        folder = cls.check(recipe)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder._claim()
        if not recipe.checkpoint.resume:
            for name in MADE_BY_A_RUN:
                _remove(folder.path / name)
        for left_over in folder.checkpoints.glob(".step_*"):
            _remove(left_over)
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        _write(folder.config, text)
        _write(folder.data, json.dumps(_contents(recipe), indent=2) + "\n")
        return folder

    def _claim(self) -> None:
        """Keep other processes out until this one ends; a lock on the folder itself, so that no file is left."""
        descriptor = os.open(self.path, os.O_RDONLY)
        status = os.fstat(descriptor)
        place = (status.st_dev, status.st_ino)
        if place in _CLAIMED:
            os.close(descriptor)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"output_dir: another run is writing to {self.path}") from None
        except OSError:  # a file system without locks
            pass
        _CLAIMED[place] = descriptor

    def what_is_left(self) -> str:
        """Of a run that has failed: the end of the line that says so."""
        newest = self.newest_checkpoint()
        return f"; go on from {newest[1]} with checkpoint.resume" if newest else "; there is no checkpoint (checkpoint.every)"

    def newest_checkpoint(self) -> tuple[int, Path] | None:
        """(steps done, folder) of the newest complete checkpoint."""
        found = self._checkpoints()
        return found[-1] if found else None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        if not self.checkpoints.is_dir():
            return []
        named = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in self.checkpoints.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match and (path / COMPLETE).is_file())

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step` steps: a resumed run does it again. It also evaluates what it starts from."""
        for path, kept in ((self.metrics, step), (self.samples, step), (self.events, step), (self.evaluations, step - 1)):
            if path.exists():
                lines = [line for line in path.read_bytes().split(b"\n") if _step(line, step + 1) <= kept]
                aside = path.with_name(f".{path.name}.partial")
                aside.write_bytes(b"".join(line + b"\n" for line in lines))
                os.replace(aside, path)

    def begin_checkpoint(self, step: int) -> Path:
        """A folder to write a checkpoint to, under a name that `newest_checkpoint` does not see."""
        aside = self.checkpoints / f".step_{step}.partial"
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def commit_checkpoint(self, step: int, keep: int) -> Path:
        """Everything is written: give the checkpoint its name, and remove all but the newest `keep`."""
        final = self.checkpoints / f"step_{step}"
        (self.begin_checkpoint(step) / COMPLETE).touch()
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


def _step(line: bytes, otherwise: int) -> int:
    """The step a log line is of; a line cut short by a kill belongs to none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return otherwise


def check_writable(path: Path, given: str, key: str = "output_dir") -> None:
    """Refuse a folder that cannot be made or written to, naming the recipe's key."""
    try:
        if not given.strip() or Path.cwd().is_relative_to(path.resolve()):
            raise UserError(f"{key}: {given!r}: name a folder of its own for the run")
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {given[:80]!r}: {getattr(error, 'strerror', None) or error}") from None
    if not nearest.is_dir():
        raise UserError(f"{key}: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {nearest} is not writable")


def _inputs(recipe: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(key, path) of everything a recipe reads."""
    for key, value in recipe.items():
        if isinstance(value, dict):
            yield from _inputs(value, f"{above}{key}.")
        elif key == "rewards":
            yield from ((f"rewards.{reward['name']}.model", reward["model"]) for reward in value if reward["model"])
        elif key in ("path", "eval_path", "tokenizer", "chat_template") and value:
            yield f"{above}{key}", value


def _write(file: Path, text: str) -> None:
    """Complete or as it was."""
    aside = file.with_name(f".{file.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, file)


def _contents(recipe: Recipe) -> dict[str, str]:
    """Key of each data file that the recipe names → hash of what is in it."""
    named = flat(recipe.model_dump(mode="json"))
    keys = ("data.path", "data.eval_path", "ptx.path", "evaluate.path")
    files = {key: Path(str(named[key])).expanduser() for key in keys if named.get(key)}
    return {key: _hash(file) for key, file in files.items() if file.is_file()}


def _hash(file: Path) -> str:
    found = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            found.update(block)
    return found.hexdigest()


MAY_CHANGE = ("overwrite", "checkpoint", "ray", "telemetry", "output_dir", "train.steps", "train.epochs", "rounds.count")
"""What a resumed run may say differently: everything else would make the rest of it another run."""


def _check_resumed(folder: RunFolder, recipe: Recipe) -> None:
    # Of a loop they say how long every round is trained.
    may_change = tuple(key for key in MAY_CHANGE if not (isinstance(recipe, LoopRecipe) and key.startswith("train.")))
    try:
        written = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"checkpoint.resume: {folder.config} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(written, dict):
        raise UserError(f"checkpoint.resume: {folder.config} is damaged: it holds no recipe")
    if folder.data.is_file():
        try:
            kept = dict(json.loads(folder.data.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise UserError(f"checkpoint.resume: {folder.data} is damaged") from None
        for key, content in _contents(recipe).items():
            if kept.get(key, content) != content:
                raise UserError(f"{key}: the file is not what it was when the run in {folder.path} began")
    before, now = flat(written), flat(recipe.model_dump(mode="json"))
    for key in sorted({*before, *now}):
        if not key.startswith(may_change) and before.get(key) != now.get(key):
            raise UserError(f"{key}: {now.get(key)!r}, but the run to resume in {folder.path} has {before.get(key)!r}")


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line; complete or absent."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(aside, path)


def write_untrained(checkpoint: Path, carried: Sequence[int], next_group: int) -> None:
    """Say in a checkpoint which groups had been admitted and not trained, and which comes next."""
    (checkpoint / "groups.json").write_text(json.dumps({"carried": list(carried), "next": next_group}), encoding="utf-8")


def read_untrained(checkpoint: Path) -> tuple[tuple[int, ...], int]:
    """What `write_untrained` said.

    Raises:
        UserError: the file is missing or not what was written; a run cannot go on without it, lest groups be trained twice.
    """
    file = checkpoint / "groups.json"
    try:
        groups = json.loads(file.read_text(encoding="utf-8"))
        carried, following = groups["carried"], groups["next"]
        sound = isinstance(carried, list) and all(type(group) is int and group >= 0 for group in (*carried, following))
        if sound and len({*carried, following}) == len(carried) + 1:
            return tuple(carried), following
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"checkpoint.resume: {file} does not say which prompts are trained; resume from another checkpoint")


def write_control(checkpoint: Path, state: dict[str, Any]) -> None:
    """Keep in a checkpoint what later steps' settings come from (`pipeline/control.py`)."""
    (checkpoint / "control.json").write_text(json.dumps(state), encoding="utf-8")


def read_control(checkpoint: Path) -> dict[str, Any] | None:
    """What `write_control` kept; None: a checkpoint of a version that had no such settings.

    Raises:
        UserError: the file is not what was written.
    """
    file = checkpoint / "control.json"
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f"checkpoint.resume: {file} cannot be read; resume from another checkpoint") from None


def is_filled(path: Path) -> bool:
    """Whether a file has content, or a folder entries."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
