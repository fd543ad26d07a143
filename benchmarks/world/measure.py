"""What is measured of a policy: the true reward of its answers to held-out prompts, and how far it went from the SFT policy."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.world.truth import true_reward
from conveyor.config.sections import Model
from conveyor.data.samples import Sample
from conveyor.models.language_model import load_language_model
from conveyor.models.sample_logprobs import sample_logprobs
from conveyor.pipeline.sampling import Sampled

BATCH = 128


@dataclass(frozen=True)
class Measured:
    true_reward: float
    """Mean over samples,"""
    error: float
    """and its standard error, over prompts."""
    exact: float
    """Share of answers that are right to the letter."""
    kl: float
    """KL(π ‖ π_SFT) of an answer, nats: mean of Σ log π − log π_SFT over the samples."""


def measure(policy: Path, sft: Path, samples: Sequence[Sampled]) -> Measured:
    """Of samples that `policy` gave at temperature 1. A policy that was asked under a condition is asked for its log-probs under it too."""
    flat = [(sampled.prompt, rollout) for sampled in samples for rollout in sampled.rollouts]
    by_prompt = [
        statistics.fmean(true_reward(rollout.text, sampled.prompt.columns["answer"]) for rollout in sampled.rollouts) for sampled in samples
    ]
    right = [true_reward(rollout.text, prompt.columns["answer"]) for prompt, rollout in flat]
    asked = [_sample(prompt.sampling_ids or prompt.token_ids, rollout.response_ids.numpy()) for prompt, rollout in flat]
    plain = [_sample(prompt.token_ids, rollout.response_ids.numpy()) for prompt, rollout in flat]
    ratios = logprobs(load_language_model(Model(path=str(policy))), asked) - logprobs(load_language_model(Model(path=str(sft))), plain)
    return Measured(
        true_reward=statistics.fmean(right),
        error=statistics.stdev(by_prompt) / len(by_prompt) ** 0.5,
        exact=statistics.fmean(reward == 1 for reward in right),
        kl=float(ratios.double().mean()),
    )


@torch.no_grad()
def logprobs(model: PreTrainedModel, samples: Sequence[Sample]) -> torch.Tensor:
    """float32 [n]"""
    return torch.cat([sample_logprobs(model, samples[first : first + BATCH]) for first in range(0, len(samples), BATCH)])


def trained_tokens(run: Path) -> int:
    """Prompt and response tokens that the policy's forward and backward passes saw. (An online step's `tokens` are responses alone.)"""
    if (samples := run / "samples.jsonl").is_file():
        trained = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        return sum(one["prompt_length"] + one["response_length"] for one in trained)
    total = 0
    for file in [run / "metrics.jsonl", *run.glob("rounds/*/train/metrics.jsonl")]:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        total += sum(row.get("tokens", 0) for row in rows)
    return total


def _sample(before: Sequence[int], after: NDArray[np.int64]) -> Sample:
    ids = np.array([*before, *after.tolist()], dtype=np.int32)
    return Sample(ids, np.arange(len(ids)) >= len(before), "")
