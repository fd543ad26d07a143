"""What a round learns from its samples, by the recipe: completions for SFT, or pairs for DPO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conveyor.config import LoopRecipe
from conveyor.config.loops import IterativeDpoRecipe, RejectionSamplingRecipe, RsoRecipe
from conveyor.data.conditional import Weighted
from conveyor.data.pairs import Pair
from conveyor.data.samples import Sample
from conveyor.loops import select
from conveyor.loops.samples_file import Line, tokens_of

Row = dict[str, Any]
"""A line of selected.jsonl: a row of text that `conveyor train` takes as well, with the ids that were sampled."""


def selected_rows(recipe: LoopRecipe, number: int, lines: Iterable[Line]) -> Iterator[Row]:
    """The rows of round `number` (from 0), prompt by prompt.

    What is drawn depends on (seed, prompt's index) only, so a resumed round draws the same.
    """
    for line in lines:
        scores = [sample["score"] for sample in line["samples"]]
        rng = np.random.default_rng([recipe.seed % 2**63, line["index"]])
        if isinstance(recipe, RejectionSamplingRecipe):
            for sample in _best(recipe, scores):
                yield _completion(line, sample)
        else:
            for better, worse in _pairs(recipe, number, line, scores, rng):
                if line["samples"][better]["response_ids"] != line["samples"][worse]["response_ids"]:
                    yield _pair(line, better, worse)


def _best(recipe: RejectionSamplingRecipe, scores: select.Scores) -> list[int]:
    least = recipe.select.min_score
    best = select.best_of(scores, recipe.select.keep)
    return [sample for sample in best if least is None or (scores[sample] or 0.0) >= least]


def _pairs(recipe: LoopRecipe, number: int, line: Line, scores: select.Scores, rng: np.random.Generator) -> Sequence[select.Pair]:
    if isinstance(recipe, RsoRecipe):
        accepted = select.statistical_rejection(scores, recipe.select.beta, recipe.select.accept, rng)
        pairs_of = select.tournament_pairs if recipe.select.pairing == "tournament" else select.first_round_pairs
        return pairs_of(accepted, scores, rng)
    assert isinstance(recipe, IterativeDpoRecipe)
    settings = recipe.select
    kept = set(range(len(scores)))
    if settings.etas:
        kept = set(select.multi_step(scores, settings.etas[:number], settings.etas[number], rng))
        scores = [score if sample in kept else None for sample, score in enumerate(scores)]
    if settings.pairs == "all":
        return select.all_pairs(scores, settings.max_pairs)
    if settings.pairs == "max_uncertainty":
        found = [{**sample["rewards"]} if place in kept else {} for place, sample in enumerate(line["samples"])]
        pair = select.max_uncertainty_pair([[rewards.get(reward.name) for rewards in found] for reward in recipe.rewards])
    else:
        pair = select.best_worst_pair(scores)
    return [pair] if pair else []


def _completion(line: Line, sample: int) -> Row:
    row: Row = {"row": line["row"], "sample": sample, "prompt": line["prompt"], "prompt_ids": line["prompt_ids"]}
    return row | _side("completion", "score", line["samples"][sample])


def _pair(line: Line, better: int, worse: int) -> Row:
    row: Row = {"row": line["row"], "prompt": line["prompt"], "prompt_ids": line["prompt_ids"]}
    for name, sample in (("chosen", better), ("rejected", worse)):
        row |= _side(name, f"{name}_score", line["samples"][sample])
    return row


def _side(name: str, score: str, sample: dict[str, Any]) -> Row:
    side = {name: sample["response"], score: sample["score"], f"{name}_ids": sample["response_ids"]}
    return side | ({f"{name}_mask": sample["response_mask"]} if "response_mask" in sample else {})


def as_completions(rows: Iterable[Row], file: Path) -> list[Weighted]:
    """Items of the SFT of a round."""
    return [Weighted(_tokens(row, "completion", f"{file}:{i}"), 1.0) for i, row in enumerate(rows, start=1)]


def as_pairs(rows: Iterable[Row], file: Path) -> list[Pair]:
    """Items of the DPO of a round."""
    return [Pair(_tokens(row, "chosen", f"{file}:{i}"), _tokens(row, "rejected", f"{file}:{i}")) for i, row in enumerate(rows, start=1)]


def _tokens(row: Row, name: str, place: str) -> Sample:
    return tokens_of(row["prompt_ids"], row[f"{name}_ids"], row.get(f"{name}_mask"), place)
