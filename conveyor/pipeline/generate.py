"""`conveyor generate MODEL --data FILE`: batch inference over a dataset; with rewards in the recipe, their scores too."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.checks import check_sampling
from conveyor.config import OnlineRecipe
from conveyor.pipeline.row_store import settings_of
from conveyor.pipeline.sampled_rows import add_arguments as add_common_arguments
from conveyor.pipeline.sampled_rows import open_store, print_summary, sample_rows
from conveyor.pipeline.sampling import Sampled
from conveyor.pipeline.sampling_recipe import Source, add_condition_argument, condition, lay_over, sampling_recipe
from conveyor.types import Prompt, Rollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "conveyor generate MODEL --data FILE [--recipe RECIPE.yaml] [--n 4] [--logprobs] [--dotted.key value ...]"
    parser.add_argument("model", help="model folder, hub id, or the folder of a run (whose recipe and model are taken)")
    parser.add_argument("--data", required=True, help="prompts: .jsonl, .json, .parquet, .csv or a hub id")
    parser.add_argument("--recipe", help="whose rollout, data and rewards sections say how")
    parser.add_argument("--n", type=int, help="samples of one prompt; default: the recipe's, else 1")
    parser.add_argument("--logprobs", action="store_true", help="write token ids and the log-prob of each sampled token")
    add_common_arguments(parser, "runs/generate/ and MODEL's name")
    add_condition_argument(parser)


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    recipe = generation_recipe(known, overrides)
    template = condition(recipe, known)
    prompts = check_sampling(recipe, template)
    store = open_store(recipe, "samples", settings_of(recipe, condition=template, logprobs=known.logprobs), overwrite=known.overwrite)
    if store.complete is not None:
        print(f"{store.complete}: complete already; --overwrite samples anew")
        return 0
    speed = sample_rows("generate", recipe, prompts, store, lambda sampled: sample_rows_of(sampled, known.logprobs))
    counts = Counts()
    file = store.finish(counts.of(store.rows()), known.format)
    print_summary(recipe.model.path, {**counts.summary(), "tokens/s": speed or None}, file)
    return 0


def generation_recipe(known: argparse.Namespace, overrides: dict[str, str]) -> OnlineRecipe:
    """Raises UserError where a key is wrong."""
    source = Source.read(known.model, known.recipe)
    raw = source.sections
    raw.pop("evaluate", None)
    raw["data"] = {**raw.get("data", {}), "path": known.data}
    source.fit_lengths()
    if known.n is not None:
        raw["rollout"]["n_samples_per_prompt"] = known.n
    lay_over(raw, overrides, "generate")
    name = "_".join(Path(known.model).parts[-2:]).strip("/.") or "model"
    return sampling_recipe(raw, known.output_dir or f"runs/generate/{name}", "generate")


def sample_rows_of(sampled: Sampled, logprobs: bool) -> list[dict[str, Any]]:
    """One row a sample: a dataset of `prompt` and `completion` with what else is known."""
    prompt = sampled.prompt
    said: Any = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
    rows = []
    for rollout, rewards, score in zip(sampled.rollouts, sampled.rewards, sampled.scores, strict=True):
        row = {
            "row": prompt.row + 1, "sample": rollout.sample, "prompt": said, "completion": rollout.text,
            "finish_reason": rollout.finish_reason, "response_length": int(rollout.sampled_mask.sum()),
            "logprob": float(rollout.logprobs.double().sum()),
        }  # fmt: skip
        row |= _tokens(prompt, rollout) if logprobs else {}
        row |= {"rewards": dict(rewards), "score": score} if rewards else {}
        rows.append(row | {"columns": dict(prompt.columns)})
    return rows


def _tokens(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """`prompt_ids`: what the model has read, condition included."""
    ids = list(prompt.sampling_ids or prompt.token_ids)
    return {"prompt_ids": ids, "response_ids": rollout.response_ids.tolist(), "logprobs": rollout.logprobs.tolist()}


@dataclass
class Counts:
    """Sums over rows as they pass."""

    prompts: int = 0
    samples: int = 0
    tokens: int = 0
    truncated: int = 0
    scored: int = 0
    score: float = 0.0

    def of(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self.prompts += row["sample"] == 0
            self.samples += 1
            self.tokens += row["response_length"]
            self.truncated += row["finish_reason"] != "stop"
            if (score := row.get("score")) is not None:
                self.scored, self.score = self.scored + 1, self.score + score
            yield row

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompts": self.prompts, "samples": self.samples, "response_length/mean": self.tokens / max(self.samples, 1),
            "truncated_fraction": self.truncated / max(self.samples, 1),
        }  # fmt: skip
        return found | ({"reward/mean": self.score / self.scored} if self.scored else {})
