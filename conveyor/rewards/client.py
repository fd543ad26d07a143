"""A reward behind a url, such as a server of `conveyor serve-reward`.

    POST url   {"prompts": […], "completions": […], "completion_ids": […], "truncated": […], column: […], argument: …}
    answer     {"scores": [0.5, null, …]}

The very arguments of a reward function, and in `truncated` whether a limit cut the sample. A server that
does not answer is asked again and again: an outage makes the run wait and loses nothing. Requests are made in an event loop,
in a thread of its own: only there can one be given up at its deadline whatever the server does, and at `close`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
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
MOST_ANSWER, MOST_SCORE = 2**20, 64
"""Bytes of an answer: so many, and so many more a sample."""
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
        limits = httpx.Limits(max_connections=reward.workers, keepalive_expiry=KEEP_ALIVE)
        self._client = httpx.AsyncClient(timeout=None, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._key, daemon=True)
        self._thread.start()
        self._headers = {"content-type": "application/json"}
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards _silent_since, and the loop against requests after `close`
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
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        asyncio.run_coroutine_threadsafe(self._end_requests(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_requests(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._client.aclose()

    def _call(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        answer = self._ask(self._body(rollouts), MOST_ANSWER + MOST_SCORE * len(rollouts))
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RewardError(f'{self._key}: the answer is no {{"scores": […]}} but {_words(answer)}') from None
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

    def _ask(self, body: bytes, most: int) -> bytes:
        """The first answer that is not a sign of an outage, of `most` bytes at most."""
        since, wait = time.monotonic(), FIRST_WAIT
        while True:
            try:
                status, answer = self._post(body, most)
            except (httpx.TransportError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if 200 <= status < 300:
                    self._heard()
                    return answer
                reason = f"{status}: {_words(answer)}"
                if status != 429 and status < 500:
                    raise RewardError(f"{self._key}: the server refuses: {reason}")
            self._silent(reason)
            if time.monotonic() - since > self._reward.outage:
                raise RewardError(f"{self._key}: no answer for {self._reward.outage:g} s; at last {reason}")
            # The jitter keeps workers that failed together from coming back together.
            if self._closed.wait(wait * random.uniform(0.5, 1.0)):
                raise CallClosed
            wait = min(2 * wait, LONGEST_WAIT)

    def _post(self, body: bytes, most: int) -> tuple[int, bytes]:
        """One request: status and body of the answer."""
        with self._lock:
            if self._closed.is_set():
                raise CallClosed
            exchange = asyncio.run_coroutine_threadsafe(self._exchange(body, most), self._loop)
        try:
            return exchange.result()
        except CancelledError:
            raise CallClosed from None

    async def _exchange(self, body: bytes, most: int) -> tuple[int, bytes]:
        """Raises TimeoutError past the deadline, which is the whole answer's."""
        answer = bytearray()
        try:
            async with asyncio.timeout(self._reward.timeout):
                async with self._client.stream("POST", self._reward.url or "", content=body, headers=self._headers) as response:
                    async for piece in response.aiter_bytes():
                        answer += piece
                        if len(answer) > most and response.is_success:
                            raise RewardError(f"{self._key}: the answer is longer than {most} bytes")
                        if len(answer) > most:
                            break
                    return response.status_code, bytes(answer)
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {self._reward.timeout:g} s") from None
        except httpx.DecodingError as error:  # of gzip and the like
            return response.status_code, f"what cannot be decompressed: {error}".encode()

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


def _words(answer: bytes) -> str:
    """What the server says, in one line: the `detail` of a JSON object, else the beginning of the text."""
    try:
        words = str(json.loads(answer)["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        words = answer.decode(errors="replace")
    text = " ".join(words[: 10 * MOST_WORDS].encode(errors="replace").decode().split())
    return text if len(text) <= MOST_WORDS else text[:MOST_WORDS] + "…"
