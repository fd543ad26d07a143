"""`conveyor score DATA`: rewards of responses that are there already, whoever wrote them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conveyor.checks import check_scoring
from conveyor.config import OnlineRecipe, UserError
from conveyor.data.rows import BadRows, read_rows
from conveyor.pipeline.row_store import RowStore, settings_of
from conveyor.pipeline.sampled_rows import add_arguments as add_common_arguments
from conveyor.pipeline.sampled_rows import open_store, print_summary, sample_rows
from conveyor.pipeline.sampling import Sampled
from conveyor.pipeline.sampling_recipe import Source, lay_over, named_functions, sampling_recipe

NO_POLICY = ""
"""Model path of a recipe whose rewards are functions and urls: they read text, so no tokenizer is needed."""
SLOTS = "rollout.max_concurrent_requests"
MOST_IN_FLIGHT = 256
"""Rows on their way to rewards, unless the recipe says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "conveyor score DATA [--reward path.py:function] [--model REWARD_MODEL] [--recipe RECIPE.yaml] [--dotted.key value ...]"
    parser.add_argument(
        "data", help="rows of prompt and completion, such as conveyor generate writes: .jsonl, .json, .parquet, .csv, hub id"
    )
    parser.add_argument("--reward", action="append", default=[], help="reward function; may be repeated")
    parser.add_argument("--model", action="append", default=[], help="reward model: folder or hub id; may be repeated")
    parser.add_argument("--recipe", help="whose rewards and data sections say how; --reward and --model come instead of its rewards")
    parser.add_argument("--policy", help="model whose tokenizer makes token ids of the text; default: that of the first reward model")
    add_common_arguments(parser, "runs/score/ and the name of DATA")


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    recipe = scoring_recipe(known, overrides)
    completions = check_scoring(recipe)
    store = open_store(recipe, "scores", settings_of(recipe), overwrite=known.overwrite)
    if store.complete is not None:
        print(f"{store.complete}: complete already; --overwrite scores anew")
        return 0
    sample_rows("score", recipe, completions, store, _score_of, replay=True)
    means = Means([reward.name for reward in recipe.rewards])
    file = store.finish(means.of(scored_rows(recipe, store)), known.format)
    print_summary(recipe.data.path, means.summary(), file)
    return 0


def scoring_recipe(known: argparse.Namespace, overrides: dict[str, str]) -> OnlineRecipe:
    """Raises UserError where a key is wrong, or there is no reward."""
    raw = Source.read(known.data, known.recipe).sections
    raw.pop("evaluate", None)
    if known.reward or known.model:
        raw["rewards"] = named_functions(known.reward) + _named_models(known.model)
    if not raw.get("rewards"):
        raise UserError("score: name a reward with --reward, --model or --recipe")
    raw["data"] = {**raw.get("data", {}), "path": known.data}
    # Nothing is sampled: of the rollout section the number of rows on their way is all that is left.
    slots = (raw.get("rollout") or {}).get("max_concurrent_requests", MOST_IN_FLIGHT)
    raw["rollout"] = {"n_samples_per_prompt": 1, "max_concurrent_requests": slots}
    if unused := [key for key in overrides if key.startswith(("rollout", "evaluate", "model")) and key != SLOTS]:
        raise UserError(f"--{unused[0]}: score samples nothing; of these sections it knows {SLOTS}")
    lay_over(raw, overrides, "score")
    models = [reward for reward in raw["rewards"] if isinstance(reward, dict) and reward.get("model")]
    raw["model"] = {**raw["model"], "path": known.policy or (models[0]["model"] if models else NO_POLICY)}
    # There are no engines; their place is that of a reward model.
    roles = raw.get("roles") or {}
    place = "score"
    if isinstance(roles, dict):  # other values are refused below
        place = (models and roles.get(models[0].get("name"))) or roles.get("score", place)
        raw["roles"] = {**roles, "rollout": place}
    name = Path(known.data).with_suffix("").name or "data"
    if Path(known.data).parent.name and name in ("samples", "scores"):
        name = Path(known.data).parent.name
    recipe = sampling_recipe(raw, known.output_dir or f"runs/score/{name}", "score")
    return recipe if models else recipe.model_copy(update={"devices": {place: 0.01}})


def _named_models(models: list[str]) -> list[dict[str, Any]]:
    """Rewards of models, by the names of their folders."""
    short = ["".join(c if c.isalnum() else "_" for c in Path(model).name) for model in models]
    names = [name if name[:1].isalpha() and name.isascii() else f"model_{name}" for name in short]
    return [
        {"name": name if names.count(name) == 1 else f"{name}_{number}", "model": model}
        for number, (name, model) in enumerate(zip(names, models, strict=True), start=1)
    ]


def _score_of(sampled: Sampled) -> list[dict[str, Any]]:
    return [{"row": sampled.prompt.row, "rewards": dict(sampled.rewards[0]), "score": sampled.scores[0]}]


def scored_rows(recipe: OnlineRecipe, store: RowStore) -> Iterator[dict[str, Any]]:
    """The rows of the data with their rewards; those that were dropped are not among them."""
    data = recipe.data
    rows = read_rows(data.path, data.split, BadRows("drop"), "data.path")
    for found in store.rows():
        row = next(row for row in rows if row.number == found["row"])
        yield {**row.values, "rewards": found["rewards"], "score": found["score"]}


class Means:
    """Of rewards and score, over rows as they pass."""

    def __init__(self, names: list[str]) -> None:
        self._sums = {name: (0.0, 0) for name in ["mean", *names]}
        self._rows = 0

    def of(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self._rows += 1
            for name, value in {**row["rewards"], "mean": row["score"]}.items():
                if value is not None:
                    total, count = self._sums[name]
                    self._sums[name] = total + value, count + 1
            yield row

    def summary(self) -> dict[str, Any]:
        """A reward that applies to no row has none."""
        means = {f"reward/{name}": total / count if count else None for name, (total, count) in self._sums.items()}
        return {"rows": self._rows, **means}
