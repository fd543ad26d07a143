"""A round's line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conveyor.config import LoopRecipe
from conveyor.config.loops import RejectionSamplingRecipe
from conveyor.loops.samples_file import read_lines
from conveyor.report.progress import read_metrics


def round_metrics(recipe: LoopRecipe, number: int, samples: Path, selected: Path, learnt: Sequence[Path], train: Path) -> dict[str, Any]:
    """What was sampled, selected and learnt.

    Args:
        number: of the round, from 0.
        selected: the round's selected.jsonl.
        learnt: selected.jsonl of every round that was learnt from; none: the round was skipped.
        train: folder of the round's training, whose last metrics become train/….
    """
    chosen = list(read_lines(selected))
    row: dict[str, Any] = {"step": number + 1, **samples_metrics(recipe, samples), "selected": len(chosen)}
    if isinstance(recipe, RejectionSamplingRecipe):
        row["selected/score"] = _mean(one["score"] for one in chosen)
    else:
        row["selected/margin"] = _mean(one["chosen_score"] - one["rejected_score"] for one in chosen)
    row["learnt"] = sum(1 for file in learnt for _ in read_lines(file))
    last = read_metrics(train / "metrics.jsonl")[-1] if learnt else {}
    left_out = ("epoch", "time/step", "tokens_per_second")
    return row | {f"train/{name}": value for name, value in last.items() if name not in left_out}


def samples_metrics(recipe: LoopRecipe, file: Path) -> dict[str, Any]:
    """Of a file of samples, in prompt order."""
    groups = [line["samples"] for line in read_lines(file)]
    samples = [sample for group in groups for sample in group]
    row: dict[str, Any] = {"prompts": len(groups), "samples": len(samples), "reward/mean": _mean(one["score"] for one in samples)}
    row["reward/best"] = _mean(max((one["score"] for one in group if one["score"] is not None), default=None) for group in groups)
    for reward in recipe.rewards:
        row[f"reward/{reward.name}"] = _mean(one["rewards"][reward.name] for one in samples)
    row["response_length/mean"] = _mean(len(one["response_ids"]) for one in samples)
    return row | {"truncated_fraction": _mean(float(one["finish_reason"] != "stop") for one in samples)}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
