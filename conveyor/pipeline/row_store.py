"""Rows of a command that may be killed at any time: what is finished stays, and the file is complete or absent.

NAME.partial.jsonl   one line a finished prompt, in order of completion; goes when the file is there
NAME.settings.json   what the rows were made with: another command does not go on with them
NAME.jsonl, .parquet the rows in prompt order
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import xxhash

from conveyor.config import OnlineRecipe, UserError
from conveyor.run_folder import flat, write_lines

FileFormat = Literal["jsonl", "parquet"]
MAY_CHANGE = (
    "output_dir", "overwrite", "ray", "telemetry", "devices", "roles", "checkpoint", "train", "evaluate", "rollout.max_concurrent_requests",
    "rollout.gpu_memory_utilization", "rollout.cpu_kv_cache_gib", "pipeline.micro_batch_size",
)  # fmt: skip
"""Keys of a recipe that do not change the rows."""


NAMES = ("samples", "scores")


class RowStore:
    """The rows of one command in its folder. `open`, then `append` for each prompt, then `finish`."""

    def __init__(self, folder: Path, name: str) -> None:
        """name: of the rows, one of `NAMES`."""
        self.folder, self._name = folder, name
        self._partial, self._settings = folder / f"{name}.partial.jsonl", folder / f"{name}.settings.json"
        self._places: dict[int, int] = {}
        """Prompt → where its line begins."""

    @property
    def done(self) -> set[int]:
        """Prompts whose rows are there."""
        return set(self._places)

    @property
    def complete(self) -> Path | None:
        """The file, if it is there."""
        return next((file for file in map(self.file, ("jsonl", "parquet")) if file.exists()), None)

    @property
    def begun(self) -> bool:
        return self._settings.exists()

    def file(self, kind: str) -> Path:
        return self.folder / f"{self._name}.{kind}"

    def check(self, settings: Mapping[str, Any]) -> None:
        """Whether a command with these settings may go on with what is there.

        Raises:
            UserError: names the first key that differs, or the file that nobody knows the settings of.
        """
        if not self.begun:
            if (there := self.complete) is not None:
                raise UserError(f"--output-dir: {there} is not of this command; name another folder, or --overwrite it")
            return
        try:
            before = dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{self._settings} cannot be read; --overwrite begins anew") from None
        now = json.loads(json.dumps(settings))
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                raise UserError(
                    f"{key}: {now.get(key)!r}, but {self.folder} was begun with {before.get(key)!r}; "
                    "--overwrite begins anew, --output-dir names another folder"
                )

    def open(self, settings: Mapping[str, Any]) -> None:
        """Go on with what is there, or begin. A last line that was cut by a kill is taken off.

        Raises:
            UserError: as `check`, or a line is not what was written.
        """
        self.check(settings)
        if not self.begun:
            aside = self._settings.with_name(f".{self._settings.name}.partial")
            aside.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(aside, self._settings)
        self._lines = self._partial.open("a+b")
        self._lines.seek(0)
        end = 0
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                break
            self._places[self._read(line, number)["index"]] = end
            end += len(line)
        self._lines.truncate(end)

    def append(self, index: int, rows: list[dict[str, Any]]) -> None:
        """A prompt is finished: a kill from here on does not lose it."""
        self._places[index] = self._lines.seek(0, os.SEEK_END)
        self._lines.write(json.dumps({"index": index, "rows": rows}, ensure_ascii=False).encode() + b"\n")
        self._lines.flush()

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, in order of their prompts."""
        for _, place in sorted(self._places.items()):
            self._lines.seek(place)
            yield from self._read(self._lines.readline(), 0)["rows"]

    def finish(self, rows: Iterable[dict[str, Any]], kind: FileFormat) -> Path:
        """Write the file; what it was made of goes.

        Raises:
            UserError: Parquet cannot hold these rows, which stay: it has one type a column, and integers of 64 bits.
        """
        file, spool = self.file(kind), self.folder / f".{self._name}.rows.jsonl"
        if kind == "jsonl":
            write_lines(file, rows)
        else:
            write_lines(spool, rows)
            _write_parquet(spool, file)
        spool.unlink(missing_ok=True)  # a kill may have left one, whatever the format is now
        self._lines.close()
        self._partial.unlink()
        return file

    def close(self) -> None:
        self._lines.close()

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            found = json.loads(line)
            assert type(found["index"]) is int and isinstance(found["rows"], list)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise UserError(f"{self._partial}:{number}: not what was written there; --overwrite begins anew") from None
        return dict(found)


def _write_parquet(spool: Path, file: Path) -> None:
    """A few rows at a time, in two passes: a column's type may show late, where its first rows are all null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def tables() -> Iterator[pa.Table]:
        with spool.open(encoding="utf-8") as lines:
            while rows := [_for_parquet(json.loads(line)) for line in islice(lines, 1024)]:
                yield pa.Table.from_pylist(rows)

    aside = file.with_name(f".{file.name}.partial")
    try:
        schema = pa.unify_schemas([table.schema for table in tables()], promote_options="permissive")
        with pq.ParquetWriter(aside, schema) as writer, spool.open(encoding="utf-8") as lines:
            while rows := [_for_parquet(json.loads(line)) for line in islice(lines, 1024)]:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    except (pa.ArrowException, OverflowError) as error:
        aside.unlink(missing_ok=True)
        spool.unlink()
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--format parquet: it cannot hold these rows ({reason}); run again with --format jsonl, which has them all"
        ) from None
    os.replace(aside, file)


def _for_parquet(value: Any) -> Any:
    """Parquet has no mapping without keys: it becomes null."""
    if isinstance(value, dict):
        return {name: _for_parquet(part) for name, part in value.items()} or None
    return [_for_parquet(part) for part in value] if isinstance(value, list) else value


def settings_of(recipe: OnlineRecipe, **more: Any) -> dict[str, Any]:
    """What rows depend on: the recipe's keys, the content of its data and functions, the model's files, and what a command adds."""
    keys = flat(recipe.model_dump(mode="json", exclude={"rewards"}))
    told = {key: value for key, value in keys.items() if not key.startswith(MAY_CHANGE)}
    told |= {"data.path (content)": fingerprint(recipe.data.path), "model.path (files)": fingerprint(recipe.model.path)}
    if told["data.path (content)"] != recipe.data.path:
        del told["data.path"]  # the same file may be named in several ways
    for reward in recipe.rewards:
        told |= flat(reward.model_dump(mode="json"), f"rewards.{reward.name}.")
        source = reward.model or (reward.function or "").rpartition(":")[0]
        told[f"rewards.{reward.name} (files)"] = fingerprint(source)
    return told | more


def fingerprint(path: str) -> str:
    """What tells whether a file, or a folder's files, are still the same; of something else its name."""
    place = Path(path).expanduser()
    digest = xxhash.xxh3_128()
    if place.is_file():
        with place.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
    elif path and place.is_dir():  # a model's weights are too large to be read for this
        for part_of in sorted(place.iterdir()):
            status = part_of.stat()
            digest.update(f"{part_of.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    else:
        return path
    return digest.hexdigest()
