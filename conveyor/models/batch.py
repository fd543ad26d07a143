"""From scored samples to the tensors a train rank computes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from conveyor.algorithms.advantages import kl_penalty, place_rewards
from conveyor.algorithms.losses import kl_estimate
from conveyor.config import RunError, sections
from conveyor.models.joining import join
from conveyor.types import PartialScores, Rollout, Scored, TrainBatch
from conveyor.workers.reports import SampleReport


def merge_scores(rollouts: Sequence[Rollout], parts: Sequence[PartialScores]) -> list[Scored]:
    """What every score part says of each sample of a micro-batch, in its order."""

    def tokens(name: str, i: int) -> Tensor | None:
        return next((column[i] for part in parts if (column := getattr(part, name)) is not None), None)

    return [
        Scored(
            rollout,
            rewards={name: column[i] for part in parts for name, column in part.rewards.items()},
            reference_logprobs=tokens("reference_logprobs", i),
            old_logprobs=tokens("old_logprobs", i),
            values=tokens("values", i),
        )
        for i, rollout in enumerate(rollouts)
    ]


def sample_score(sample: Scored, weights: Mapping[str, float], missing_eos_penalty: float) -> float | None:
    """Weighted sum of the rewards that apply, less the penalty where the response was cut; None if no reward applies."""
    known = [weights[name] * reward for name, reward in sample.rewards.items() if reward is not None]
    if not known:
        return None
    total = sum(known) - (missing_eos_penalty if sample.rollout.truncated else 0.0)
    if abs(total) > torch.finfo(torch.float32).max:
        raise RunError(f"row {sample.rollout.prompt.row + 1} of the data: the weighted sum of its rewards, {total:.3g}, is beyond float32")
    return total


def sampling_logprobs(sample: Scored, on_policy: bool) -> Tensor:
    """float32 [R]: of the policy that sampled. On-policy the snapshot is that policy, and knows them by the trainer's arithmetic."""
    return sample.old_logprobs if on_policy and sample.old_logprobs is not None else sample.rollout.logprobs


def sample_report(sample: Scored, weights: Mapping[str, float], algorithm: sections.Algorithm, on_policy: bool = True) -> SampleReport:
    """The numbers of a sample that baselines, denominators and metrics are made from. `on_policy`: see `sampling_logprobs`."""
    rollout = sample.rollout
    score = sample_score(sample, weights, algorithm.missing_eos_penalty)
    kl = None
    if sample.reference_logprobs is not None:
        kl = float(kl_estimate(sampling_logprobs(sample, on_policy), sample.reference_logprobs, "k1").sum())
    outcome = score
    if score is not None and kl is not None and algorithm.kl_in == "reward":
        outcome = score - algorithm.kl_coef * kl
    return SampleReport(
        id=rollout.id,
        rewards=sample.rewards,
        score=score,
        outcome=outcome,
        kl=kl,
        response_length=len(rollout.response_ids),
        loss_tokens=len(rollout.response_ids) if _in_loss(sample, score, algorithm) else 0,
        truncated=rollout.truncated,
        oldest_version=int(rollout.versions.min()),
        version_sum=int(rollout.versions.sum()),
    )


def make_train_batch(
    samples: Sequence[Scored], weights: Mapping[str, float], algorithm: sections.Algorithm, on_policy: bool = True
) -> TrainBatch:
    """The samples in one padded batch.

    A sample's score stands on its last response token; with `kl_in: reward` every token pays
    −kl_coef · (log π − log π_ref). Samples without a score, and cut ones if `mask_truncated`, are left out of the loss.
    """
    joined = join([sample.rollout for sample in samples])
    mask = joined.response_mask
    scores = [sample_score(sample, weights, algorithm.missing_eos_penalty) for sample in samples]
    in_loss = torch.tensor([_in_loss(sample, score, algorithm) for sample, score in zip(samples, scores, strict=True)])
    token_rewards = place_rewards(torch.tensor([score or 0.0 for score in scores]), mask)
    reference = _padded([sample.reference_logprobs for sample in samples])
    if reference is not None and algorithm.kl_in == "reward":
        sampling = _padded([sampling_logprobs(sample, on_policy) for sample in samples])
        assert sampling is not None
        token_rewards = token_rewards + kl_penalty(sampling, reference, mask, algorithm.kl_coef)
    rollout_logprobs = _padded([sample.rollout.logprobs for sample in samples])
    versions = _padded([sample.rollout.versions for sample in samples])
    assert rollout_logprobs is not None and versions is not None
    return TrainBatch(
        input_ids=joined.input_ids,
        attention_mask=joined.attention_mask,
        prompt_lengths=joined.prompt_lengths,
        response_mask=mask,
        loss_mask=mask & in_loss[:, None],
        rollout_logprobs=rollout_logprobs,
        token_rewards=token_rewards,
        versions=versions,
        reference_logprobs=reference,
        old_logprobs=_padded([sample.old_logprobs for sample in samples]),
        values=_padded([sample.values for sample in samples]),
    )


def empty_batch() -> TrainBatch:
    """One token that is in no loss: what a rank without samples runs, so that it takes part in the others' gathers."""
    one, nothing = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 1)
    return TrainBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        attention_mask=torch.ones(1, 2, dtype=torch.int64),
        prompt_lengths=one[0],
        response_mask=one.bool(),
        loss_mask=~one.bool(),
        rollout_logprobs=nothing,
        token_rewards=nothing,
        versions=nothing.int(),
        reference_logprobs=nothing,
        values=nothing,
    )


def _in_loss(sample: Scored, score: float | None, algorithm: sections.Algorithm) -> bool:
    return score is not None and not (algorithm.mask_truncated and sample.rollout.truncated)


def _padded(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Rows [R] → [B, S], 0 where they have ended; None if the rows are."""
    known = [row for row in rows if row is not None]
    assert len(known) in (0, len(rows)), "a tensor of some samples only"
    return torch.nn.utils.rnn.pad_sequence(known, batch_first=True) if known else None
