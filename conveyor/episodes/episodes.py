"""The samples that a rollout function plays, on the side of the engine: from what it asks for to tokens, and to `Rollout`s.

Everything here is called by the thread that owns the engine, between two of its steps, and returns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from conveyor.config import UserError, sections
from conveyor.episodes.episode import Episode, Sampled
from conveyor.episodes.functions import EpisodeError, Turn
from conveyor.episodes.observations import observation_ids
from conveyor.episodes.process import KEY, Message
from conveyor.types import FinishReason, Prompt, Rollout


class Engine(Protocol):
    """What samples tokens; `workers/engine_requests.py` is one."""

    version: int
    """Of its weights."""

    def add(
        self, token_ids: Sequence[int], done: Callable[[Sampled], None], *, seed: int, temperature: float | None, max_tokens: int,
        stop: Sequence[str],
    ) -> str:  # fmt: skip
        """Start a request, and call `done` at its end; returns its name."""

    def abort(self, name: str) -> Sampled | None:
        """End a request that has not ended, without a call of `done`. Returns what it has sampled, as cut; None: nothing yet."""


class Episodes:
    """All samples that are being played."""

    def __init__(
        self, rollout: sections.Rollout, tokenizer: PreTrainedTokenizerBase, engine: Engine, seed: Callable[[int, int, int], int],
        send: Callable[..., None],
    ) -> None:  # fmt: skip
        """
        Args:
            seed: from (prompt's index, sample's number, turn).
            send: to the process of the function.
        """
        assert rollout.multi_turn is not None
        self._settings, self._limit, self._tokenizer = rollout.multi_turn, rollout.max_response_length, tokenizer
        self._engine, self._seed, self._send = engine, seed, send
        self._open: dict[int, Episode] = {}
        self._count = 0

    def begin(self, prompt: Prompt, sample: int, temperature: float | None, done: Callable[[Rollout], None]) -> Callable[[], None]:
        """Play a sample, and call `done` at its end. Returns what drops it before that."""
        episode = Episode(prompt, sample, temperature, done)
        self._start(episode)
        return partial(self._drop, episode)

    def hear(self, message: Message) -> None:
        """A message of `EpisodeProcess`.

        Raises:
            EpisodeError: the function failed, and the recipe says stop.
        """
        kind, number, *rest = message
        if kind == "broken":
            raise number
        if kind == "restarted":
            self._begin_anew(number, *rest)
        elif (episode := self._open.get(number)) is None:  # dropped meanwhile
            return
        elif kind == "generate":
            self._generate(episode, *rest)
        else:
            self._ended(episode, *rest)

    def _start(self, episode: Episode) -> None:
        self._count += 1
        episode.restart(self._count)
        self._open[episode.number] = episode
        prompt = episode.prompt
        told = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
        self._send("start", episode.number, {**prompt.columns, "prompt": told}, self._settings.timeout)

    def _close(self, episode: Episode) -> Sampled | None:
        """No more is heard of it. Returns the turn that is cut by that, as far as it has come."""
        del self._open[episode.number]
        return None if episode.request is None else self._engine.abort(episode.request)

    def _drop(self, episode: Episode) -> None:
        self._close(episode)
        self._send("drop", episode.number)

    def _generate(self, episode: Episode, said: Any, max_tokens: int | None, stop: list[str]) -> None:
        if episode.turns == self._settings.max_turns:
            self._cut(episode, "turns")
            return
        try:
            observed = observation_ids(self._tokenizer, said, episode.ids[-1] if episode.ids else None)
        except (ValueError, UserError) as error:
            self._send("refuse", episode.number, str(error))
            return
        left = self._limit - len(episode.ids) - len(observed)
        if left < 1:
            self._cut(episode, "length")
            return
        prompt, turn = episode.prompt, episode.turns
        episode.turns += 1
        episode.observed = observed
        episode.request = self._engine.add(
            [*prompt.token_ids, *episode.ids, *observed],
            partial(self._sampled, episode),
            seed=self._seed(prompt.index, episode.sample, turn),
            temperature=episode.temperature,
            max_tokens=min(left, max_tokens or left),
            stop=stop,
        )

    def _sampled(self, episode: Episode, turn: Sampled) -> None:
        episode.append(turn)
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        self._send("turn", episode.number, Turn(str(text), turn.token_ids, turn.finish_reason))

    def _cut(self, episode: Episode, finish: FinishReason) -> None:
        self._drop(episode)
        self._done(episode, finish)

    def _ended(self, episode: Episode, how: str, value: Any = None) -> None:
        cut = self._close(episode)
        if how == "failed":
            self._failed(episode, value)
        elif how == "time":
            if cut is not None:
                episode.append(cut)
            self._done(episode, "time")
        else:
            assert how == "returned"
            cut_short = episode.finish_reason == "length" and len(episode.ids) == self._limit  # else max_tokens has, as was asked
            self._done(episode, "length" if cut_short else "stop", columns=value)

    def _begin_anew(self, blamed: int, why: str | None) -> None:
        """Another process is there, and knows none of the samples. What was sent since may have reached it."""
        for number, episode in list(self._open.items()):
            self._drop(episode)
            if number != blamed:
                self._start(episode)
            elif why is None:
                self._done(episode, "time")
            else:
                self._failed(episode, why)

    def _failed(self, episode: Episode, text: str) -> None:
        text = f"row {episode.prompt.row + 1} of the data: {text}"
        if self._settings.on_error == "stop":
            raise EpisodeError(f"{KEY}: {text}")
        self._done(episode, "stop", failure=text)

    def _done(self, episode: Episode, finish: FinishReason, *, columns: dict[str, Any] | None = None, failure: str | None = None) -> None:
        if not episode.ids and failure is None:
            limit = self._settings.timeout
            failure = f"no token within {limit:g} s" if finish == "time" else f"ended ({finish}) without a turn of the model"
        rollout = episode.rollout(finish, columns or {}, failure, tokenizer=self._tokenizer, version=self._engine.version)
        episode.done(rollout)
