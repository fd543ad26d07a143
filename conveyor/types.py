"""The records that travel through the pipeline, one frozen type per arrow.

    Prompt ──▶ Rollout ──▶ Scored ──▶ TrainBatch
     data      workers/     workers/    models/ + algorithms/
               rollout      score

A record describes **one** sample and holds unpadded tensors; samples come together only in `TrainBatch`, the tensor form of those
that one train rank computes on at once.

Shape letters: R = response tokens of one sample, B = samples in a batch, W = width of a row of tokens (of a packed one, the tokens of all
its samples), S = longest response of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "turns", "time"]
"""`stop`: the model, or the function that plays its turns, ended by itself (EOS or a stop string). `length`: cut at the limit of
tokens. `turns`, `time`: of a sample of several turns, cut at the limit of those."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt dataset, tokenised. Its samples form a group.

    Example: `Prompt(index=12, row=2, token_ids=(1, 40, 41), text="2+2=", columns={"answer": "4"})`
    is the thirteenth prompt of the run, made from row 2 of the file in its second epoch.
    """

    index: int
    """Place in the prompt order of the whole run (all epochs): the group's only name."""
    row: int
    """0-based row of the dataset, for messages."""
    token_ids: tuple[int, ...]
    text: str
    """The prompt as text, before the chat template when the row held plain text."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The prompt as chat messages, when the row held messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; reaches reward functions."""
    sampling_ids: tuple[int, ...] | None = None
    """What the engine reads instead of `token_ids`: the prompt under a condition, of which rewards are not to know."""


class SampleId(NamedTuple):
    """Names a sample for the whole run. Orders by prompt, then by sample: the *prompt order*.

    A tuple, because thousands of them are compared, hashed and sent in every step.
    """

    group: int
    """`Prompt.index`"""
    sample: int
    """0 … n_samples_per_prompt − 1"""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response."""

    prompt: Prompt
    sample: int
    response_ids: Tensor
    """int64 [R], R ≥ 1. Holds the EOS token if and only if the model emitted one. Of a sample of several turns: everything after the
    prompt, the tokens of tools and environments among them."""
    logprobs: Tensor
    """float32 [R]: behaviour log-probabilities, of the distribution sampled from; 0 for tokens that were not sampled."""
    versions: Tensor
    """int32 [R]: the policy version that sampled each token; for others, the version of the turn before."""
    finish_reason: FinishReason
    text: str
    """The response as text, special tokens skipped."""
    sampled: Tensor | None = None
    """bool [R]: True for tokens that the policy sampled, False for those of tools and environments; None: it sampled all."""
    turns: int = 1
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What the function that played the turns tells reward functions, beside (and before) the prompt's columns."""
    experts: Tensor | None = None
    """uint8 or uint16 [prompt + R − 1, layers, experts a token]: the experts that the engine sent each token to, the last one excepted,
    which it never computed. None: it does not tell."""
    failure: str | None = None
    """Why the function that played the turns failed: the sample is left out of loss and baseline."""

    @property
    def id(self) -> SampleId:
        return SampleId(self.prompt.index, self.sample)

    @property
    def truncated(self) -> bool:
        """Cut by a limit: its last token is not an end."""
        return self.finish_reason != "stop"

    @property
    def sampled_mask(self) -> Tensor:
        """bool [R]: True for tokens that the policy sampled."""
        return torch.ones_like(self.response_ids, dtype=torch.bool) if self.sampled is None else self.sampled


@dataclass(frozen=True, slots=True)
class PartialScores:
    """What one score part (a set of roles on one device group) adds to the samples of a
    micro-batch; every tuple has one entry per sample, in the micro-batch's order."""

    rewards: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Reward name → one number a sample; None = the reward does not apply to that sample."""
    reference_logprobs: tuple[Tensor, ...] | None = None
    """float32 [R] each: log-probabilities under the reference model."""
    old_logprobs: tuple[Tensor, ...] | None = None
    """float32 [R] each: log-probabilities under the policy snapshot."""
    values: tuple[Tensor, ...] | None = None
    """float32 [R] each: V(state before token t) under the critic snapshot."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout with everything the score stage knows of it."""

    rollout: Rollout
    rewards: Mapping[str, float | None]
    reference_logprobs: Tensor | None = None
    """float32 [R]"""
    old_logprobs: Tensor | None = None
    """float32 [R]; None: the trainer's own log-probs of the same pass are the old ones."""
    values: Tensor | None = None
    """float32 [R]; None: the trainer's own values of the same pass are the old ones."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The samples of one forward pass: in one row, one after another, or each in a row of its own, padded on the right.

        packed      7 8 9 5 6     positions 0 1 2 0 1        padded     7 8 9     positions 0 1 2
                                                                        5 6 0               0 1 2

    Places are counted through the rows: row · W + column. No mask is needed: attention is causal, so what follows a sample changes nothing.
    """

    input_ids: Tensor
    """int64 [rows, W]"""
    position_ids: Tensor
    """int64 [rows, W]: each sample's start at 0."""
    starts: Tensor
    """int64 [B]: the place of each sample's first token."""
    lengths: Tensor
    """int64 [B]"""
    packed: bool
    """All samples are in one row."""
    experts: Tensor | None = None
    """int16 [rows · W, layers, K]: the experts that a token is to go to, −1: those its router chooses; None: they all are free."""

    def to(self, device: torch.device | str) -> Tokens:
        return Tokens(
            self.input_ids.to(device), self.position_ids.to(device), self.starts.to(device), self.lengths.to(device), self.packed,
            None if self.experts is None else self.experts.to(device),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of one forward and backward on one train rank.

    Prompt and response stand joined in `tokens`; everything with a meaning per response token is in *response space* [B, S]:
    column t belongs to the t-th response token.
    """

    tokens: Tokens
    prompt_lengths: Tensor
    """int64 [B]"""
    response_mask: Tensor
    """bool [B, S]: True for response tokens that the policy sampled. With tools' tokens between them it has holes."""
    loss_mask: Tensor
    """bool [B, S]: True for tokens that enter the loss (⊆ response_mask)."""
    rollout_logprobs: Tensor
    """float32 [B, S], 0 where masked (so are all below)."""
    token_rewards: Tensor
    """float32 [B, S]: the reward of each token, terminal score and KL penalty included."""
    versions: Tensor
    """int32 [B, S]"""
    reference_logprobs: Tensor | None = None
    """float32 [B, S]"""
    old_logprobs: Tensor | None = None
    """float32 [B, S]"""
    values: Tensor | None = None
    """float32 [B, S]"""

    def to(self, device: torch.device) -> TrainBatch:
        moved: dict[str, Any] = {
            name: value.to(device) for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor | Tokens)
        }
        return replace(self, **moved)
