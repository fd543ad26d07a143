"""Strings that end a response, looked for while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class StopSearch:
    """Looks for stop strings in the text of tokens that come one by one. A token's text depends on its neighbours, so a few of them are
    decoded again with each, never the whole response."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        """`decode`: from token ids to text."""
        self._decode, self._stop = decode, stop
        self._kept = max(map(len, stop)) - 1
        """Characters that may be the beginning of a stop string."""
        self._text = ""
        self._window: list[int] = []
        """The last tokens, of which the first `_read` have become text."""
        self._read = 0

    def ends(self, token: int) -> bool:
        """The next token completes a stop string."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(PART_OF_A_CHARACTER):
            return False
        self._text += text[len(self._decode(self._window[: self._read])) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        if any(stop in self._text for stop in self._stop):
            return True
        self._text = self._text[max(len(self._text) - self._kept, 0) :]
        return False
