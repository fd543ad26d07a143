"""One sample of several turns, as its tokens grow.

    prompt ids · sampled ids · observation ids · sampled ids · …
                 └──────────── the response ────────────────

Ids that are there stay as they are: nothing is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from conveyor.types import FinishReason, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine has sampled for one request."""

    token_ids: list[int]
    """K ≥ 1 of them."""
    logprobs: Tensor
    """float32 [K]"""
    versions: Tensor
    """int32 [K]"""
    finish_reason: Literal["stop", "length"]
    experts: Tensor | None = None
    """[prompt + K − 1, layers, experts a token]: where each token went, the last sampled one excepted; None: the engine does not tell."""


@dataclass(slots=True, eq=False)
class Episode:
    """A sample that is being played."""

    prompt: Prompt
    sample: int
    temperature: float | None
    done: Callable[[Rollout], None]
    number: int = 0
    """Its name at the process of the function, another one each time that it begins anew."""
    request: str | None = None
    """The engine's name of the turn that is being sampled."""
    observed: list[int] = field(default_factory=list)
    """What comes before that turn."""
    ids: list[int] = field(default_factory=list)
    """The response so far, of R tokens."""
    finish_reason: Literal["stop", "length"] | None = None
    """Of the last turn."""
    turns: int = 0
    """Asked for, the one that is being sampled included."""
    _sampled: list[Tensor] = field(default_factory=list)
    _logprobs: list[Tensor] = field(default_factory=list)
    _versions: list[Tensor] = field(default_factory=list)

    def restart(self, number: int) -> None:
        """Forget everything but the prompt."""
        self.number, self.request, self.finish_reason, self.turns = number, None, None, 0
        for column in (self.ids, self._sampled, self._logprobs, self._versions):
            column.clear()

    def append(self, turn: Sampled) -> None:
        """The turn that was being sampled, after what was observed. That has the version of the turn before it, or, at the very
        beginning, of the one that follows."""
        count, version = len(self.observed), self._versions[-1][-1] if self._versions else turn.versions[0]
        self.ids += [*self.observed, *turn.token_ids]
        self._sampled += [torch.zeros(count, dtype=torch.bool), torch.ones(len(turn.token_ids), dtype=torch.bool)]
        self._logprobs += [torch.zeros(count), turn.logprobs]
        self._versions += [version.repeat(count), turn.versions]
        self.finish_reason, self.request = turn.finish_reason, None

    def rollout(self, finish: FinishReason, columns: dict[str, Any], failure: str | None, *, tokenizer: Any, version: int) -> Rollout:
        """The sample as it is now. One of no token at all gets an EOS that was not sampled, of policy `version`."""
        settings: dict[str, Any] = dict(turns=self.turns, columns=columns, failure=failure)
        if not self.ids:
            nothing, ids = torch.zeros(1), torch.tensor([tokenizer.eos_token_id])
            versions = torch.full((1,), version, dtype=torch.int32)
            return Rollout(self.prompt, self.sample, ids, nothing, versions, finish, "", nothing.bool(), **settings)
        sampled = torch.cat(self._sampled)
        return Rollout(
            self.prompt, self.sample, torch.tensor(self.ids), torch.cat(self._logprobs), torch.cat(self._versions), finish,
            tokenizer.decode(self.ids, skip_special_tokens=True), None if bool(sampled.all()) else sampled, **settings,
        )  # fmt: skip
