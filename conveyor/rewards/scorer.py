"""A judge applied to rollouts: its arguments, its time-outs, its failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conveyor.config import UserError, sections
from conveyor.rewards.functions import GIVEN
from conveyor.rewards.process import CallFailed, CallMiscounted, CallTimeout, FunctionProcess

if TYPE_CHECKING:  # the function's own process imports this package and should not load torch
    from conveyor.types import Rollout


class RewardError(UserError):
    """A reward function or url failed; the text names the reward and, where one is to blame, the dataset's row."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reward says of one sample."""

    score: float | None
    lost: Literal["timeout", "error"] | None = None
    """Why the score could not be had."""


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """One answer a sample, in the order given."""

    answers: tuple[Answer, ...]

    @property
    def scores(self) -> tuple[float | None, ...]:
        return tuple(answer.score for answer in self.answers)

    @property
    def timeouts(self) -> int:
        """Samples scored None because the function did not answer in time."""
        return sum(answer.lost == "timeout" for answer in self.answers)

    @property
    def errors(self) -> int:
        """Samples scored None because the function failed (`on_error: skip`)."""
        return sum(answer.lost == "error" for answer in self.answers)


class Judge(ABC):
    """A reward that is called with texts. A sample it does not answer for is scored None.

    When a call for several samples fails, each is called alone: only those that fail are lost, whichever
    others share their call, and the message can name the row.
    """

    def __init__(self, reward: sections.Reward) -> None:
        self._reward = reward

    @abstractmethod
    def start(self) -> None:
        """Make ready for calls; raises UserError where that fails."""

    @abstractmethod
    def close(self) -> None:
        """End for good. Any thread may call it; a call under way then raises `process.CallClosed`."""

    @abstractmethod
    def _call(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """One call; raises CallTimeout, CallFailed, CallMiscounted, CallClosed."""

    def score(self, rollouts: Sequence[Rollout]) -> FunctionScores:
        """All of `answers`."""
        return FunctionScores(tuple(self.answers(rollouts)))

    def answers(self, rollouts: Sequence[Rollout]) -> Iterator[Answer]:
        """One answer a sample, in their order, as they become known.

        Raises:
            RewardError: the judge raised or returned something else than finite numbers and
                None, and the recipe's `on_error` is `stop`; or not one score a sample, whatever the recipe says.
        """
        try:
            yield from self._answers(rollouts)
        except CallMiscounted as error:
            # Calling its samples one by one would hide it: a function that ignores its input gets one right.
            raise RewardError(f"reward {self._reward.name}: {error}") from None

    def _answers(self, rollouts: Sequence[Rollout]) -> Iterator[Answer]:
        if len(rollouts) > 1:
            try:
                together = self._call(rollouts)
            except (CallTimeout, CallFailed):
                pass  # found out below, sample by sample
            else:
                yield from map(Answer, together)
                return
        for rollout in rollouts:
            try:
                (score,) = self._call([rollout])
                yield Answer(score)
            except CallTimeout:
                yield Answer(None, "timeout")
            except CallFailed as error:
                if self._reward.on_error == "stop":
                    raise RewardError(f"reward {self._reward.name}: row {rollout.prompt.row + 1} of the data: {error}") from None
                yield Answer(None, "error")


class FunctionReward(Judge):
    """A reward function in its process."""

    def __init__(self, reward: sections.Reward, log: Path | None = None) -> None:
        """log: file for what the function prints."""
        super().__init__(reward)
        assert reward.function is not None
        self._process = FunctionProcess(reward.function, f"rewards.{reward.name}.function", log, reward.arguments)

    def start(self) -> None:
        """Import the function in its process; raises UserError where that fails."""
        self._process.start()

    def close(self) -> None:
        self._process.end()

    def _call(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return self._process.call(call_arguments(rollouts), self._reward.timeout)


def call_arguments(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What the function is called with (see `functions`): lists with one entry a sample.

    What the function that played a sample's turns tells comes before the dataset's column of that name.
    A column that only some samples have is None for the others.
    """
    columns = [{**rollout.prompt.columns, **rollout.columns} for rollout in rollouts]
    names = sorted({name for own in columns for name in own} - set(GIVEN))
    arguments: dict[str, Any] = {
        "prompts": [_prompt(rollout) for rollout in rollouts],
        "completions": [_completion(rollout) for rollout in rollouts],
        "completion_ids": [rollout.response_ids.tolist() for rollout in rollouts],
    }
    return arguments | {name: [own.get(name) for own in columns] for name in names}


def _prompt(rollout: Rollout) -> str | list[dict[str, Any]]:
    messages = rollout.prompt.messages
    return rollout.prompt.text if messages is None else [dict(message) for message in messages]


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    return rollout.text if rollout.prompt.messages is None else [{"role": "assistant", "content": rollout.text}]
