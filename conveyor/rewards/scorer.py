"""One reward function applied to rollouts: its arguments, its time-outs, its failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conveyor.config import UserError, sections
from conveyor.rewards.functions import GIVEN
from conveyor.rewards.process import CallFailed, CallMiscounted, CallTimeout, FunctionProcess

if TYPE_CHECKING:  # the function's own process imports this package and should not load torch
    from conveyor.types import Rollout


class RewardError(UserError):
    """A reward function failed; the text names the reward and the dataset's row."""


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """One entry a sample, in the order given."""

    scores: tuple[float | None, ...]
    timeouts: int
    """Samples scored None because the function did not answer in time."""
    errors: int
    """Samples scored None because the function failed (`on_error: skip`)."""


class FunctionReward:
    """A reward function in its process. A sample it does not answer for is scored None.

    When a call for several samples fails, each is called alone: only those that fail are lost, whichever
    others share their micro-batch, and the message can name the row.
    """

    def __init__(self, reward: sections.Reward, log: Path | None = None) -> None:
        """log: file for what the function prints."""
        assert reward.function is not None
        self._reward = reward
        self._process = FunctionProcess(reward.function, f"rewards.{reward.name}.function", log)

    def start(self) -> None:
        """Import the function in its process; raises UserError where that fails."""
        self._process.start()

    def close(self) -> None:
        self._process.close()

    def score(self, rollouts: Sequence[Rollout]) -> FunctionScores:
        """Score the samples of a micro-batch.

        Raises:
            RewardError: the function raised or returned something else than finite numbers and
                None, and the recipe's `on_error` is `stop`; or not one score a sample, whatever the recipe says.
        """
        try:
            return self._score(rollouts)
        except CallMiscounted as error:
            # Calling its samples one by one would hide it: a function that ignores its input gets one right.
            raise RewardError(f"reward {self._reward.name}: {error}") from None

    def _score(self, rollouts: Sequence[Rollout]) -> FunctionScores:
        if len(rollouts) > 1:
            try:
                return FunctionScores(tuple(self._call(rollouts)), 0, 0)
            except (CallTimeout, CallFailed):
                pass  # found out below, sample by sample
        scores: list[float | None] = [None] * len(rollouts)
        timeouts = errors = 0
        for place, rollout in enumerate(rollouts):
            try:
                (scores[place],) = self._call([rollout])
            except CallTimeout:
                timeouts += 1
            except CallFailed as error:
                if self._reward.on_error == "stop":
                    raise RewardError(f"reward {self._reward.name}: row {rollout.prompt.row + 1} of the data: {error}") from None
                errors += 1
        return FunctionScores(tuple(scores), timeouts, errors)

    def _call(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        return self._process.call(call_arguments(rollouts), self._reward.timeout)


def call_arguments(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What the function is called with (see `functions`): lists with one entry a sample.

    A column that only some rows have is None for the others.
    """
    columns = sorted({name for rollout in rollouts for name in rollout.prompt.columns} - set(GIVEN))
    arguments: dict[str, Any] = {
        "prompts": [_prompt(rollout) for rollout in rollouts],
        "completions": [_completion(rollout) for rollout in rollouts],
        "completion_ids": [rollout.response_ids.tolist() for rollout in rollouts],
    }
    return arguments | {name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in columns}


def _prompt(rollout: Rollout) -> str | list[dict[str, Any]]:
    messages = rollout.prompt.messages
    return rollout.prompt.text if messages is None else [dict(message) for message in messages]


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    return rollout.text if rollout.prompt.messages is None else [{"role": "assistant", "content": rollout.text}]
