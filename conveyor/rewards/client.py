"""A reward behind a url, such as a server of `conveyor serve-reward`.

    POST url   {"prompts": […], "completions": […], "completion_ids": […], "truncated": […], column: […], argument: …}
    answer     {"scores": [0.5, null, …]}

The very arguments of a reward function, and in `truncated` whether a limit cut the sample. A server that
does not answer is asked again and again: an outage makes the run wait and loses nothing.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import httpx

from conveyor.config import UserError, sections
from conveyor.rewards.functions import WrongCount, checked_scores
from conveyor.rewards.process import CallClosed, CallFailed, CallMiscounted
from conveyor.rewards.scorer import Judge, RewardError, call_arguments

if TYPE_CHECKING:
    from conveyor.types import Rollout

log = logging.getLogger(__name__)

FIRST_WAIT = 1.0
"""Seconds before a request is made again; doubled each time."""
LONGEST_WAIT = 30.0
KEEP_ALIVE = 2.0
"""Seconds an idle connection is kept: less than servers keep theirs, or a request would meet one that is just closing."""
MOST_WORDS = 300
"""Characters of a server's own words in a message."""


class UrlReward(Judge):
    """A reward server. Any number of threads may ask it at once."""

    def __init__(self, reward: sections.Reward, token: str | None = None, say: Callable[[str], None] = log.warning) -> None:
        """Args:
        token: the bearer token; default: that of the environment variable, if the recipe names one.
        say: takes what the user should read, an outage's beginning and its end.
        """
        super().__init__(reward)
        self._token, self._say = token, say
        assert reward.url is not None
        self._key = f"rewards.{reward.name}.url"
        self._client = httpx.Client(
            timeout=reward.timeout, limits=httpx.Limits(max_connections=reward.workers, keepalive_expiry=KEEP_ALIVE)
        )
        self._headers = {"content-type": "application/json"}
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards _silent_since
        self._silent_since: float | None = None

    def start(self) -> None:
        """Read the token. The server is not asked: it may come later.

        Raises:
            UserError: no such environment variable, or not a url.
        """
        try:
            host = httpx.URL(self._reward.url or "").host
        except httpx.InvalidURL as error:
            raise UserError(f"{self._key}: {self._reward.url!r}: {error}") from None
        if not host:
            raise UserError(f"{self._key}: {self._reward.url!r} names no host")
        if (variable := self._reward.token_variable) is not None:
            token = self._token or os.environ.get(variable)
            if not token:
                raise UserError(f"rewards.{self._reward.name}.token_variable: the environment variable {variable} is not set")
            self._headers["authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def _call(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        response = self._ask(self._body(rollouts))
        try:
            scores = response.json()["scores"]
        except (ValueError, KeyError, TypeError):
            raise RewardError(f'{self._key}: the answer is no {{"scores": […]}} but {_words(response)}') from None
        try:
            return checked_scores(scores, len(rollouts))
        except WrongCount as error:
            raise CallMiscounted(str(error)) from None
        except ValueError as error:
            raise CallFailed(str(error)) from None

    def _body(self, rollouts: Sequence[Rollout]) -> bytes:
        arguments = call_arguments(rollouts) | {"truncated": [rollout.truncated for rollout in rollouts]} | self._reward.arguments
        try:
            return json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:  # a date, bytes, NaN, half of a surrogate pair
            rows = f"row {rollouts[0].prompt.row + 1}" + (f" or one of {len(rollouts) - 1} more" if len(rollouts) > 1 else "")
            raise RewardError(f"{self._key}: {rows} of the data cannot be sent as JSON: {error}") from None

    def _ask(self, body: bytes) -> httpx.Response:
        """The first answer that is not a sign of an outage."""
        url, since, wait = httpx.URL(self._reward.url or ""), time.monotonic(), FIRST_WAIT
        while True:
            try:
                response = self._client.post(url, content=body, headers=self._headers)
                reason = f"{response.status_code}: {_words(response)}"
                if response.is_success:
                    self._heard()
                    return response
                if response.status_code != 429 and response.status_code < 500:
                    raise RewardError(f"{self._key}: the server refuses: {reason}")
            except RewardError:
                raise
            except Exception as error:
                if self._closed.is_set():
                    raise CallClosed from None
                if not isinstance(error, httpx.TransportError):
                    raise
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
            self._silent(reason)
            if time.monotonic() - since > self._reward.outage:
                raise RewardError(f"{self._key}: no answer for {self._reward.outage:g} s; at last {reason}")
            # The jitter keeps workers that failed together from coming back together.
            if self._closed.wait(wait * random.uniform(0.5, 1.0)):
                raise CallClosed
            wait = min(2 * wait, LONGEST_WAIT)

    def _silent(self, reason: str) -> None:
        with self._lock:
            if self._silent_since is None:
                self._silent_since = time.monotonic()
                self._say(f"{self._key}: does not answer: {reason}; waiting up to {self._reward.outage:g} s")

    def _heard(self) -> None:
        with self._lock:
            if self._silent_since is not None:
                self._say(f"{self._key}: answers again, after {time.monotonic() - self._silent_since:.0f} s")
                self._silent_since = None


def _words(response: httpx.Response) -> str:
    """What the server says, in one line: the `detail` of a JSON object, else the beginning of the text."""
    try:
        words = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        words = response.text
    text = " ".join(str(words).split())
    return text if len(text) <= MOST_WORDS else text[:MOST_WORDS] + "…"
