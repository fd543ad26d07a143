"""Rows of a dataset, each knowing its place, so that a bad one is a single line naming file, row and key.

JSONL, JSON and CSV are read here and not through `datasets`, whose readers guess types over a whole file and
lose line numbers. Parquet files carry their types and go through Arrow, hub ids through `datasets`.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import logging
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from conveyor.config import UserError

log = logging.getLogger(__name__)

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv")
TOO_DEEP = "lists or objects nested too deeply"
CHAT_KEYS = ("messages", "conversations")
"""Columns with a whole chat, the first a row has is read."""
ROLE_OF = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Who speaks in a sharegpt-style message, `{"from": …, "value": …}`."""


class RowError(UserError):
    """A malformed row: `data.jsonl:7: completion: missing`."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


@dataclass(frozen=True, slots=True)
class Row:
    place: str
    """`file:line` where the file has lines, else `file: row N` (0-based)."""
    number: int
    """0-based, counting every row of the file."""
    values: Mapping[str, Any]
    typed: bool = True
    """False for a row of CSV, whose numbers and truth values are text."""

    def error(self, reason: str) -> RowError:
        return RowError(self.place, reason)

    def has(self, key: str) -> bool:
        """CSV and Parquet have every column in every row, so an empty cell counts as absent."""
        return self.values.get(key) is not None

    def chat_key(self) -> str | None:
        """The column with the row's chat, if it has one."""
        return next((key for key in CHAT_KEYS if self.has(key)), None)

    def text_or_messages(self, key: str) -> str | list[dict[str, Any]]:
        """The value under `key`: a text that is not empty, or chat messages (one alone may stand without its list).

        Raises:
            RowError: it is missing, empty, or neither of the two.
        """
        value = self.values.get(key)
        if isinstance(value, str):
            if not value:
                raise self.error(f"{key}: empty")
            return value
        if value is not None and not isinstance(value, list | dict):
            raise self.error(f"{key}: must be text or a list of messages, not {type(value).__name__}")
        return self.messages(key)

    def messages(self, key: str) -> list[dict[str, Any]]:
        """The chat under `key` as mappings with `role` and `content`, written like that or as `from` and `value`.

        Raises:
            RowError: it is missing, empty, or no chat; a speaker is unknown.
        """
        value = self.values.get(key)
        if value is None:
            raise self.error(f"{key}: missing")
        if isinstance(value, dict):
            return [self._message(key, value)]
        if not isinstance(value, list):
            raise self.error(f"{key}: must be a list of messages, not {type(value).__name__}")
        if not value:
            raise self.error(f"{key}: no messages")
        messages = [self._message(f"{key}[{i}]", message) for i, message in enumerate(value)]
        system = self.values.get("system")
        if key in CHAT_KEYS and isinstance(system, str) and system and messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages]  # as some sharegpt files have it
        return messages

    def _message(self, where: str, message: Any) -> dict[str, Any]:
        # Parquet fills keys that only some messages have with null; templates would print it.
        parts = {name: part for name, part in message.items() if part is not None} if isinstance(message, dict) else {}
        text = "content"
        if "role" not in parts and "from" in parts:
            speaker, text = parts.pop("from"), "value"
            if not isinstance(speaker, str) or speaker not in ROLE_OF:
                raise self.error(f"{where}.from: unknown speaker {reprlib.repr(speaker)}; one of {', '.join(ROLE_OF)}")
            parts = {"role": ROLE_OF[speaker], "content": parts.pop("value", None), **parts}
        if not isinstance(parts.get("role"), str):
            raise self.error(f"{where}: a message is a mapping with `role` and `content`, or with `from` and `value`")
        if not isinstance(parts.get("content"), str):
            raise self.error(f"{where}.{text}: must be text")
        return parts

    def boolean(self, key: str) -> bool:
        """Raises RowError where the value is missing or not true or false; a 0 or 1 is neither."""
        value = self.values.get(key)
        if value is None:
            raise self.error(f"{key}: missing")
        if not self.typed and str(value).strip().lower() in ("true", "false"):
            return str(value).strip().lower() == "true"
        if not isinstance(value, bool):
            raise self.error(f"{key}: must be true or false, not {reprlib.repr(value)}")
        return value

    def finite(self, key: str) -> float:
        """Raises RowError where the value is missing or not a finite number."""
        value = self.values.get(key)
        if value is None:
            raise self.error(f"{key}: missing")
        try:
            if not isinstance(value, bool) and isinstance(value, int | float | str) and not (self.typed and isinstance(value, str)):
                number = float(value)
                if math.isfinite(number):
                    return number
        except (ValueError, OverflowError):
            pass  # falls through to the one message for all that is no number
        raise self.error(f"{key}: must be a finite number, not {reprlib.repr(value)}")


@dataclass
class BadRows:
    """What becomes of malformed rows: the first ends the run, or all are dropped and counted."""

    policy: Literal["error", "drop"]
    dropped: int = 0
    first: RowError | None = None

    def reject(self, error: RowError) -> None:
        """Raise, or count the row."""
        if self.policy == "error":
            raise error
        self.dropped += 1
        self.first = self.first or error

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
        items = _rows_of_hub(source, split, key)
    elif suffix in EXTENSIONS:
        items = _READERS[suffix](path, key)
    else:
        raise UserError(f"{key}: {source}: unknown extension; one of {', '.join(EXTENSIONS)}")
    for item in items:
        if isinstance(item, RowError):
            bad.reject(item)
        else:
            yield item


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
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: {_not_utf8(error)}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte {error.object[error.start]:#04x})"


def _whole_characters(row: Row, text: str) -> Row | RowError:
    """Refuses what only a JSON escape in `text` can spell and no tokenizer takes: one half of a surrogate pair."""
    for key, value in row.values.items() if "\\u" in text else ():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            return row.error(f"{key.encode('ascii', 'backslashreplace').decode()}: {half} is half a character, no valid Unicode")
        except RecursionError:
            return row.error(f"{key}: {TOO_DEEP}")
    return row


def _rows_of_jsonl(path: Path, key: str) -> Iterator[Row | RowError]:
    number = 0
    with path.open("rb") as file:
        # Cut at line feeds alone: JSON strings may hold U+2028 and its kin, which text lines would be cut at.
        for line, raw in enumerate(file, start=1):
            place = f"{path}:{line}"
            try:
                content = raw.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield RowError(place, _not_utf8(error))
            else:
                if not content.strip():
                    continue
                yield _object(place, number, content)
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
    return _whole_characters(Row(place, number, value), content)


def _json_error(error: ValueError) -> str:
    """Where in the line; the line itself is known."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _rows_of_json(path: Path, key: str) -> Iterator[Row | RowError]:
    text = read_utf8(path)
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
        if isinstance(item, dict):
            yield _whole_characters(Row(place, number, item), text)
        else:
            yield RowError(place, f"must be an object, not {type(item).__name__}")


def _rows_of_csv(path: Path, key: str) -> Iterator[Row | RowError]:
    """Every cell is text, as written: `007` stays `007`. An empty cell is absent."""
    reader = csv.DictReader(io.StringIO(read_utf8(path), newline=""), strict=True)
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
            yield Row(place, number, {name: cell for name, cell in cells.items() if cell != ""}, typed=False)
        number += 1


def _rows_of_parquet(path: Path, key: str) -> Iterator[Row | RowError]:
    import pyarrow.lib
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for values in _python_rows(batch):
                place = f"{path}: row {number}"
                yield RowError(place, _not_utf8(values)) if isinstance(values, UnicodeDecodeError) else _plain_row(place, number, values)
                number += 1
    except (pyarrow.lib.ArrowInvalid, OSError) as error:
        raise UserError(f"{key}: {path}: not a Parquet file: {str(error).splitlines()[0]}") from None


def _python_rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a pyarrow.RecordBatch; Arrow takes any bytes for text, Python does not."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            yield error
        else:
            for i in range(len(batch)):
                yield from _python_rows(batch.slice(i, 1))


def _plain_row(place: str, number: int, values: Mapping[str, Any]) -> Row | RowError:
    """A row of what JSON knows too, as rewards and files of samples take it."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        try:
            plain[key] = _plain(value)
        except TypeError as error:
            return RowError(place, f"{key}: {error}")
    return Row(place, number, plain)


def _plain(value: Any) -> Any:
    """Times become ISO text, decimals floats. TypeError: bytes, or any other type that is no JSON."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    raise TypeError(f"a column of {type(value).__name__}; text, numbers, truth values, lists, mappings and times can be used")


def _rows_of_hub(name: str, split: str, key: str) -> Iterator[Row | RowError]:
    import datasets

    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # network, hub and builder errors have no common type; all mean the same to the user
        raise UserError(f"{key}: neither a file nor a hub dataset that can be read: {name}: {str(error).splitlines()[0]}") from error
    for number, values in enumerate(dataset):
        yield _plain_row(f"{name}: row {number}", number, values)


_READERS: dict[str, Callable[[Path, str], Iterator[Row | RowError]]] = {
    ".jsonl": _rows_of_jsonl, ".json": _rows_of_json, ".parquet": _rows_of_parquet, ".csv": _rows_of_csv,
}  # fmt: skip
