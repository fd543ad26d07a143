"""Files of one JSON object a line, read while they may still be written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) for each line. A last line without its line break is still being written, or was cut
    by a kill: it is left out.

    Raises:
        ValueError: a line is no JSON object; names file and line.
    """
    try:
        *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: not an object")
        yield number, value
