"""The small records workers send the driver. Free of Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conveyor.algorithms.metrics import Metrics, Moments
from conveyor.algorithms.scores import RewardScale
from conveyor.types import SampleId


class MicroBatchKey(NamedTuple):
    """Names a micro-batch: the `number`-th of the `update`-th base update of a step.

    With several passes over a step, update u of pass p trains the same micro-batches again.
    """

    step: int
    update: int
    number: int


@dataclass(frozen=True, slots=True)
class Span:
    """When a worker was busy with a call: seconds of its own `time.time()`."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    worker: str
    node: str
    pid: int
    device: str
    time: float = field(default_factory=time.time)
    """Its clock when it answered."""


@dataclass(frozen=True, slots=True)
class SampleDone:
    """A sample has left an engine; its Rollout follows in the same stream."""

    id: SampleId
    tokens: int
    truncated: bool
    oldest_version: int
    newest_version: int
    span: Span
    """From admission to the last token."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What the rewards that are functions or urls say of a sample."""

    id: SampleId
    version: int
    """Of the sample's first token: tells the rounds of an evaluation apart."""
    rewards: Mapping[str, float | None]
    """By name; None = the reward does not apply, or could not be had."""
    timeouts: int
    """Rewards that did not come in time."""
    errors: int
    """Rewards whose function failed, where the recipe says skip."""
    span: Span
    """From when the sample came until its last reward was there."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should read now: a reward server does not answer, or does again."""

    text: str


@dataclass(frozen=True, slots=True)
class EvaluationAborted:
    """A sample of an evaluation has made room for new weights; no Rollout follows."""

    id: SampleId
    version: int
    """That was to be evaluated."""
    span: Span


@dataclass(frozen=True, slots=True)
class ScoreReport:
    span: Span


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What the steps before tell a step: the same for all its micro-batches, whenever they come."""

    kl_coef: float
    scales: Mapping[str, RewardScale] = field(default_factory=dict)
    """Rewards that are normalised by earlier steps' samples."""


@dataclass(frozen=True, slots=True)
class SampleReport:
    """What the driver knows of a prepared sample: enough for group baselines and metrics."""

    id: SampleId
    rewards: Mapping[str, float | None]
    score: float | None
    """Weighted sum of the rewards that apply, penalties included, KL not; None: none applies,
    so the sample is left out of loss and baseline."""
    outcome: float | None
    """`score` less `kl_penalty`."""
    kl: float | None
    """Sum over tokens of log π − log π_ref (k1), under the sampling policy."""
    response_length: int
    """Tokens that the policy sampled."""
    loss_tokens: int
    truncated: bool
    oldest_version: int
    version_sum: int
    """Over tokens, of the versions that sampled them."""
    kl_penalty: float = 0.0
    """The sequence's, where the KL is in the reward."""
    moments: Moments | None = None
    """Of the advantages of its tokens in the loss before a baseline is taken off: where they go by token and are whitened."""
    baseline: bool = False
    """The greedy sample of its group, which is not trained."""
    turns: int = 1
    total_length: int = 0
    """Tokens after the prompt, those of tools among them: what rollout.max_response_length bounds."""


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """One rank's share of a micro-batch is ready to train."""

    key: MicroBatchKey
    samples: tuple[SampleReport, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What a micro-batch needs from beyond itself: made by the driver from `SampleReport`s."""

    outcome_advantages: Mapping[SampleId, float] | None = None
    """Group estimators: one advantage a sample, the same for each of its tokens. Of `best_worst` the signs of a pair."""
    baselines: Mapping[SampleId, float] | None = None
    """What is taken off a sample's returns."""
    scores: Mapping[SampleId, float | None] | None = None
    """Rewards normalised by batch: the samples' scores, which only the whole update tells."""
    whiten: tuple[float, float] | None = None
    """(mean, standard deviation) over the update, applied to every advantage."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole update and all ranks, applied once, just before the optimizer step."""

    tokens: int
    """Tokens in the loss."""
    sequences: int
    """Sequences with at least one token in the loss."""
    samples: int
    """All that are trained, in the loss or not."""
    pairs: int
    """Groups with a best and a worst sample."""
    whiten: tuple[float, float] | None = None
    """`streaming_exact`: (mean, standard deviation) of the update's advantages, known only now."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    metrics: Metrics
    span: Span
    moments: Moments | None = None
    """`streaming_exact`: of this rank's advantages."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step of one model."""

    grad_norm: float
    """Before clipping, of the mean gradient."""
    lr: float
    skipped: bool = False
    """The update had nothing in its loss (or its gradient was not finite); weights are unchanged."""


@dataclass(frozen=True, slots=True)
class OptimReport:
    steps: Mapping[str, StepReport]
    """Role → its optimizer step."""
    span: Span
    metrics: Metrics = field(default_factory=dict)
    """Of the loss that is mixed in (PPO-ptx), this rank's part."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Weights of one version: in the object store, or at the trainer until an engine asks for them."""

    version: int
    role: str
    buckets: tuple[Any, ...]
    """Object references, each to a `weight_sync.Bucket`."""
    checksums: Mapping[str, str] | None
    nbytes: int
    span: Span
    layout: tuple[Any, ...] = ()
    """Engines get them from the trainer (`weight_stream.py`), as these `weight_sync.Place`s; empty: from the object store."""


@dataclass(frozen=True, slots=True)
class InstallReport:
    version: int
    nbytes: int
    span: Span
    mismatched: tuple[str, ...] = ()
    """Tensors whose checksum differs from the publisher's (only looked at with verify_sync)."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A line of samples.jsonl."""

    id: SampleId
    prompt: str
    response: str
    rewards: Mapping[str, float | None]
    score: float | None
    advantage: float | None
    """Mean over the response's tokens, as it entered the loss."""
    version: int
    finish_reason: str
    prompt_length: int
    """Tokens, like `response_length`."""
    response_length: int
