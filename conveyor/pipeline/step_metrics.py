"""From what workers report of a step to its line of metrics.jsonl. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.config import OnlineRecipe
from conveyor.workers.reports import Judged, OptimReport, SampleReport


def sample_metrics(recipe: OnlineRecipe, step: int, reports: Sequence[SampleReport]) -> dict[str, Any]:
    """Of the samples of a step; greedy baselines count as tokens only, and have a mean of their own."""
    samples = [sample for sample in reports if not sample.baseline]
    scores = [sample.score for sample in samples if sample.score is not None]
    lengths = [sample.response_length for sample in samples]
    metrics: dict[str, Any] = {"reward/mean": _mean(scores)}
    for reward in recipe.rewards:
        metrics[f"reward/{reward.name}"] = _mean([value for s in samples if (value := s.rewards.get(reward.name)) is not None])
    if recipe.greedy_baseline:
        metrics["reward/greedy"] = _mean([s.score for s in reports if s.baseline and s.score is not None])
    if recipe.uses_reference:
        metrics["kl"] = sum(sample.kl or 0.0 for sample in samples) / max(1, sum(lengths))
    if recipe.rollout.multi_turn is not None:
        metrics["turns/mean"] = _mean([float(sample.turns) for sample in samples])
    return metrics | {
        "samples": len(samples),
        "samples/unscored": len(samples) - len(scores),
        "response_length/mean": _mean([float(length) for length in lengths]),
        "truncated_fraction": _mean([float(sample.truncated) for sample in samples]),
        "tokens": sum(sample.response_length for sample in reports),
        "staleness/max": step - min(sample.oldest_version for sample in samples),
        "staleness/mean": step - sum(sample.version_sum for sample in samples) / max(1, sum(lengths)),
    }


def drop_metrics(recipe: OnlineRecipe, dropped: Sequence[Sequence[Judged]], samples: Sequence[SampleReport]) -> dict[str, Any]:
    """Dynamic sampling: the groups that were left out, and the mean of functions and urls over all that was sampled."""
    if not recipe.rollout.dynamic_sampling:
        return {}
    weights = {reward.name: reward.weight for reward in recipe.judged_rewards}
    everything = [sample.rewards for sample in samples if not sample.baseline]
    everything += [judged.rewards for group in dropped for judged in group]
    known = [[weights[name] * value for name, value in rewards.items() if name in weights and value is not None] for rewards in everything]
    return {"groups/dropped": len(dropped), "reward/sampled": _mean([sum(values) for values in known if values])}


def optim_metrics(reports: Sequence[OptimReport]) -> dict[str, Any]:
    """Of the optimizer steps of a step, by rank 0 of each train group."""
    metrics: dict[str, Any] = {}
    for role in ("actor", "critic"):
        steps = [report.steps[role] for report in reports if role in report.steps]
        if steps:
            suffix = "" if role == "actor" else "/critic"
            metrics[f"grad_norm{suffix}"] = _mean([s.grad_norm for s in steps if not s.skipped])
            metrics[f"lr{suffix}"] = steps[-1].lr
            metrics[f"updates_skipped{suffix}"] = sum(s.skipped for s in steps)
    return metrics


def sync_metrics(published: Sequence[tuple[int, float]], installs: Sequence[float]) -> dict[str, Any]:
    """Of weights on their way.

    Args:
        published: (bytes, seconds) of each model that the step published.
        installs: seconds of those since the line before, usually of the version that the step was sampled with.
    """
    return {
        "sync/bytes": sum(nbytes for nbytes, _ in published),
        "sync/publish_seconds": sum(seconds for _, seconds in published),
        "sync/install_seconds": max(installs, default=0.0),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
