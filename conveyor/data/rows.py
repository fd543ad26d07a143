"""Rows of a dataset, each knowing its place, so that a bad one is a single line naming file, row and key.

JSONL, JSON and CSV are read here and not through `datasets`, whose readers guess types over a whole file and
lose line numbers. Parquet files carry their types and go through Arrow, hub ids through `datasets`.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from conveyor.config import UserError

log = logging.getLogger(__name__)

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv")
TOO_DEEP = "lists or objects nested too deeply"


class RowError(UserError):
    """A malformed row: `data.jsonl:7: completion: missing`."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


@dataclass(frozen=True, slots=True)
class Row:
    place: str
    """`file:line` where the file has lines, else `file: row N` (0-based)."""
    number: int
    """0-based, counting every row of the file."""
    values: Mapping[str, Any]

    def error(self, reason: str) -> RowError:
        return RowError(self.place, reason)

    def has(self, key: str) -> bool:
        """CSV and Parquet have every column in every row, so an empty cell counts as absent."""
        return self.values.get(key) is not None

    def text_or_messages(self, key: str) -> str | list[dict[str, Any]]:
        """The value under `key`: a text that is not empty, or chat messages.

        Raises:
            RowError: it is missing, empty, or neither of the two.
        """
        value = self.values.get(key)
        if value is None:
            raise self.error(f"{key}: missing")
        if isinstance(value, str):
            if not value:
                raise self.error(f"{key}: empty")
            return value
        return self.messages(key)

    def messages(self, key: str) -> list[dict[str, Any]]:
        value = self.values.get(key)
        if value is None:
            raise self.error(f"{key}: missing")
        if not isinstance(value, list):
            raise self.error(f"{key}: must be text or a list of messages, not {type(value).__name__}")
        if not value:
            raise self.error(f"{key}: no messages")
        for i, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise self.error(f"{key}[{i}]: a message is a mapping with `role` and `content`")
            if not isinstance(message.get("content"), str):
                raise self.error(f"{key}[{i}].content: must be text")
        # Parquet fills keys that only some messages have with null; templates would print it.
        return [{name: part for name, part in message.items() if part is not None} for message in value]


@dataclass
class BadRows:
    """What becomes of malformed rows: the first ends the run, or all are dropped and counted."""

    policy: Literal["error", "drop"]
    dropped: int = 0
    first: RowError | None = None
    last_place: str = ""

    def reject(self, error: RowError) -> None:
        """Raise, or count the row; a row rejected twice in a row (both sides of a pair) counts once."""
        if self.policy == "error":
            raise error
        self.dropped += error.place != self.last_place
        self.first, self.last_place = self.first or error, error.place

    def report(self, kept: int, source: str) -> None:
        """Log what was dropped.

        Raises:
            UserError: no row is left.
        """
        if self.dropped:
            log.warning("%s: dropped %d malformed rows of %d; the first: %s", source, self.dropped, self.dropped + kept, self.first)
        if not kept:
            why = f": all {self.dropped} rows are malformed; the first: {self.first}" if self.dropped else ": the dataset is empty"
            raise UserError(f"{source}{why}")


def read_rows(source: str, split: str, bad: BadRows, key: str = "data.path") -> Iterator[Row]:
    """The rows of a file or hub dataset, in order; those that cannot be read at all go to `bad`.

    Raises:
        UserError: no such file or dataset, an unknown extension, a file that is not UTF-8 or not what its extension says.
    """
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        raise UserError(f"{key}: {source} is a folder; name a file ({', '.join(EXTENSIONS)}) or a hub id")
    if not path.exists():
        if suffix in EXTENSIONS or source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise UserError(f"{key}: {source}: no such file")
        yield from _rows_of_hub(source, split, key)
        return
    if suffix not in EXTENSIONS:
        raise UserError(f"{key}: {source}: unknown extension; one of {', '.join(EXTENSIONS)}")
    if suffix == ".parquet":
        yield from _rows_of_parquet(path, key)
        return
    text = read_utf8(path)
    readers = {".jsonl": _rows_of_jsonl, ".json": _rows_of_json, ".csv": _rows_of_csv}
    for item in readers[suffix](path, text):
        checked = _whole_characters(item) if isinstance(item, Row) and "\\u" in text else item
        if isinstance(checked, RowError):
            bad.reject(checked)
        else:
            yield checked


def chunks(rows: Iterable[Row], size: int = 1024) -> Iterator[list[Row]]:
    """Rows a few at a time: enough for fast batch tokenising, too few to hold a dataset's text twice."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def read_utf8(path: Path) -> str:
    """A file's text, without a byte order mark.

    Raises:
        UserError: names the line that is not UTF-8.
    """
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte {raw[error.start]:#04x})") from None


def _whole_characters(row: Row) -> Row | RowError:
    """Refuses what only a JSON escape can spell and no tokenizer takes: one half of a surrogate pair."""
    for key, value in row.values.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            return row.error(f"{key.encode('ascii', 'backslashreplace').decode()}: {half} is half a character, no valid Unicode")
        except RecursionError:
            return row.error(f"{key}: {TOO_DEEP}")
    return row


def _rows_of_jsonl(path: Path, text: str) -> Iterator[Row | RowError]:
    number = 0
    # Not splitlines(): JSON strings may hold U+2028 and its kin, which that would cut at.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        yield _object(f"{path}:{line}", number, content)
        number += 1


def _object(place: str, number: int, content: str) -> Row | RowError:
    try:
        value = json.loads(content)
    except ValueError as error:
        return RowError(place, f"not valid JSON: {_json_error(error)}")
    except RecursionError:
        return RowError(place, TOO_DEEP)
    if not isinstance(value, dict):
        return RowError(place, f"a row is a JSON object, this is a {type(value).__name__}")
    return Row(place, number, value)


def _json_error(error: ValueError) -> str:
    """Where in the line; the line itself is known."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _rows_of_json(path: Path, text: str) -> Iterator[Row | RowError]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (one object a line is .jsonl)") from None
    except ValueError as error:  # a number of too many digits
        raise UserError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: {TOO_DEEP}") from None
    if not isinstance(value, list):
        raise UserError(f"{path}: a .json dataset is one list of objects, this is a {type(value).__name__} (one object a line is .jsonl)")
    for number, item in enumerate(value):
        place = f"{path}: row {number}"
        yield Row(place, number, item) if isinstance(item, dict) else RowError(place, f"must be an object, not {type(item).__name__}")


def _rows_of_csv(path: Path, text: str) -> Iterator[Row | RowError]:
    """Every cell is text, as written: `007` stays `007`. An empty cell is absent."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    number = 0
    while True:
        try:
            if twice := [name for name, times in Counter(reader.fieldnames or ()).items() if times > 1]:
                raise UserError(f"{path}:{reader.line_num}: the header has the column {twice[0] or 'without a name'} twice")
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None
        place = f"{path}:{reader.line_num}"
        if None in cells or None in cells.values():
            yield RowError(place, f"{'more' if None in cells else 'fewer'} cells than the header has")
        else:
            yield Row(place, number, {name: cell for name, cell in cells.items() if cell != ""})
        number += 1


def _rows_of_parquet(path: Path, key: str) -> Iterator[Row]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        yield from _numbered(str(path), (row for batch in batches for row in batch.to_pylist()))
    except (pyarrow.lib.ArrowInvalid, OSError) as error:
        raise UserError(f"{key}: {path}: not a Parquet file: {str(error).splitlines()[0]}") from None


def _rows_of_hub(name: str, split: str, key: str) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # network, hub and builder errors have no common type; all mean the same to the user
        raise UserError(f"{key}: neither a file nor a hub dataset that can be read: {name}: {str(error).splitlines()[0]}") from error
    yield from _numbered(name, dataset)


def _numbered(source: str, values: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for number, row in enumerate(values):
        yield Row(f"{source}: row {number}", number, row)
