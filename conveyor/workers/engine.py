"""What a rollout worker needs of an engine, whichever it is.

    add ─▶ step ─▶ step ─▶ step ─▶ done(Sampled)       requests join at any time, and leave at any step
              ▲       ▲
           install  abort                              between two steps

One thread calls everything, so requests join and leave without locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from conveyor.episodes.episode import Sampled
from conveyor.workers.reports import Publication


class Engine(Protocol):
    """An engine and what it samples at the moment. `engine_requests.py` is vLLM's, `transformers_engine.py` another."""

    version: int
    """Of the weights."""
    asleep: bool

    def __bool__(self) -> bool:
        """Whether there is anything to sample."""

    def add(
        self, token_ids: Sequence[int], done: Callable[[Sampled], None], *, seed: int, temperature: float | None = None,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Start a request, and call `done` at its end; returns its name. The same request and seed give the same tokens in any batch.

        Args:
            temperature: default: the recipe's; 0 takes the likeliest tokens.
            max_tokens: default: the recipe's `max_response_length`.
            stop: strings that end it, beside the recipe's.
        """

    def abort(self, name: str) -> Sampled | None:
        """End a request that has not ended, without a call of `done`. Returns what it has sampled, as cut; None: nothing yet."""

    def step(self) -> None:
        """A token for every request that is not waiting for one of `rollout.max_concurrent_requests` places."""

    def install(self, publication: Publication) -> tuple[str, ...]:
        """New weights for every token from here on; requests are kept. Returns the names of tensors that were damaged on the way."""

    def sleep(self) -> None:
        """Give memory back until `wake`; nothing is running. Asleep an engine takes weights, and no requests."""

    def wake(self) -> None:
        """The memory back. What comes next is sampled as if there had been no sleep."""

    def shutdown(self) -> None: ...
