"""From scored samples to the tensors a train rank computes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conveyor.algorithms.advantages import kl_penalty, place_rewards
from conveyor.algorithms.losses import kl_estimate
from conveyor.algorithms.scores import sample_score
from conveyor.config import OnlineRecipe, RunError, sections
from conveyor.data.packing import lay_out
from conveyor.models.joining import join
from conveyor.types import PartialScores, Rollout, Scored, TrainBatch
from conveyor.workers.reports import SampleReport, StepSettings


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


def score_of(sample: Scored, recipe: OnlineRecipe, settings: StepSettings) -> float | None:
    """The sample's score (`algorithms.scores.sample_score`); None also where the function that played its turns failed.

    Raises:
        RunError: it is beyond float32; names the row.
    """
    rollout = sample.rollout
    if rollout.failure is not None:
        return None
    total = sample_score(
        sample.rewards, recipe.rewards, settings.scales, truncated=rollout.truncated, length=len(rollout.response_ids),
        algorithm=recipe.algorithm, max_response_length=recipe.rollout.max_response_length,
    )  # fmt: skip
    if total is not None and abs(total) > torch.finfo(torch.float32).max:
        raise RunError(f"row {rollout.prompt.row + 1} of the data: the weighted sum of its rewards, {total:.3g}, is beyond float32")
    return total


def sampling_logprobs(sample: Scored, recipe: OnlineRecipe) -> Tensor:
    """float32 [R]: of the policy that sampled. On-policy the snapshot is that policy, and knows them by the trainer's arithmetic."""
    on_policy = recipe.pipeline.max_staleness == 0
    return sample.old_logprobs if on_policy and sample.old_logprobs is not None else sample.rollout.logprobs


def sample_report(sample: Scored, recipe: OnlineRecipe, settings: StepSettings) -> SampleReport:
    """The numbers of a sample that baselines, denominators and metrics are made from."""
    rollout, algorithm = sample.rollout, recipe.algorithm
    sampled = rollout.sampled_mask
    tokens = int(sampled.sum())
    score = score_of(sample, recipe, settings)
    kl, penalty = None, 0.0
    if sample.reference_logprobs is not None:
        logprobs, reference = sampling_logprobs(sample, recipe)[sampled], sample.reference_logprobs[sampled]
        kl = float(kl_estimate(logprobs, reference, "k1").sum())
        if algorithm.kl_in == "reward":
            penalty = settings.kl_coef * float(kl_estimate(logprobs, reference, algorithm.kl_estimator).sum())
    baseline = is_baseline(rollout, recipe)
    return SampleReport(
        id=rollout.id,
        rewards=sample.rewards,
        score=score,
        outcome=None if score is None else score - penalty,
        kl=kl,
        response_length=tokens,
        total_length=len(rollout.response_ids),
        loss_tokens=tokens if _in_loss(sample, score, algorithm) and not baseline else 0,
        truncated=rollout.truncated,
        oldest_version=int(rollout.versions.min()),
        version_sum=int(rollout.versions[sampled].sum()),
        kl_penalty=penalty,
        baseline=baseline,
        turns=rollout.turns,
    )


def is_baseline(rollout: Rollout, recipe: OnlineRecipe) -> bool:
    """Whether it is the greedy sample of its group."""
    return recipe.greedy_baseline and rollout.sample == recipe.rollout.n_samples_per_prompt


def make_train_batch(samples: Sequence[Scored], recipe: OnlineRecipe, settings: StepSettings, packed: bool) -> TrainBatch:
    """The samples in one batch. `packed`: in one row of tokens.

    A sample's score stands on its last response token; with `kl_in: reward` every token pays
    for its KL. Samples without a score, and cut ones if `mask_truncated`, are left out of the loss.
    """
    joined = join([sample.rollout for sample in samples], packed)
    mask = joined.response_mask
    scores = [score_of(sample, recipe, settings) for sample in samples]
    in_loss = torch.tensor([_in_loss(sample, score, recipe.algorithm) for sample, score in zip(samples, scores, strict=True)])
    rollout_logprobs = _padded([sample.rollout.logprobs for sample in samples])
    versions = _padded([sample.rollout.versions for sample in samples])
    assert rollout_logprobs is not None and versions is not None
    return TrainBatch(
        tokens=joined.tokens,
        prompt_lengths=joined.prompt_lengths,
        response_mask=mask,
        loss_mask=mask & in_loss[:, None],
        rollout_logprobs=rollout_logprobs,
        token_rewards=token_rewards(samples, scores, mask, recipe, settings),
        versions=versions,
        reference_logprobs=_padded([sample.reference_logprobs for sample in samples]),
        old_logprobs=_padded([sample.old_logprobs for sample in samples]),
        values=_padded([sample.values for sample in samples]),
    )


def token_rewards(
    samples: Sequence[Scored], scores: Sequence[float | None], mask: Tensor, recipe: OnlineRecipe, settings: StepSettings
) -> Tensor:
    """float32 [B, S]: each sample's score on its last sampled token, and with `kl_in: reward` the KL penalty on every one."""
    rewards = place_rewards(torch.tensor([score or 0.0 for score in scores]), mask)
    reference = _padded([sample.reference_logprobs for sample in samples])
    if reference is None or recipe.algorithm.kl_in != "reward" or settings.kl_coef == 0:
        return rewards
    sampling = _padded([sampling_logprobs(sample, recipe) for sample in samples])
    assert sampling is not None
    return rewards + kl_penalty(sampling, reference, mask, settings.kl_coef, recipe.algorithm.kl_estimator)


def empty_batch(packed: bool) -> TrainBatch:
    """One token that is in no loss: what a rank without samples runs, so that it takes part in the others' gathers."""
    one, nothing = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 1)
    return TrainBatch(
        tokens=lay_out([[0, 0]], packed),
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
