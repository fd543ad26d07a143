"""Everything that can be known to be wrong before a model is loaded: `conveyor check`, and the start of every run."""

from __future__ import annotations

import os
from pathlib import Path

from conveyor.config import OnlineRecipe, UserError, sections
from conveyor.data.prompts import PromptOrder, load_prompts
from conveyor.data.tokenizer import load_tokenizer
from conveyor.rewards.functions import load_function
from conveyor.run_folder import RunFolder


def check_online(recipe: OnlineRecipe) -> PromptOrder:
    """Checks folders, files, tokenizer, rows and reward functions; changes nothing.

    Returns:
        The prompts in the order of the run, which only a sound recipe has.

    Raises:
        UserError: the first thing that is wrong.
    """
    RunFolder.check(recipe)
    for key, model in _models(recipe).items():
        check_model(key, model.path)
    for reward in recipe.rewards:
        if reward.function is not None:
            load_function(reward.function, f"rewards.{reward.name}.function")
    tokenizer = load_tokenizer(recipe.model)
    prompts = load_prompts(recipe.data, tokenizer)
    train = recipe.train
    order = PromptOrder(
        prompts, train.rollout_batch_size, epochs=train.epochs, steps=train.steps, shuffle=recipe.data.shuffle, seed=recipe.seed,
        drop_last=recipe.data.drop_last,
    )  # fmt: skip
    if len(order) == 0:
        raise UserError("train.steps: nothing to do")
    return order


def _models(recipe: OnlineRecipe) -> dict[str, sections.Model]:
    models = {"model.path": recipe.model}
    if recipe.reference is not None:
        models["reference.path"] = recipe.reference
    if recipe.critic is not None:
        models["critic.path"] = recipe.critic
    for reward in recipe.rewards:
        if reward.model is not None:
            models[f"rewards.{reward.name}.model"] = sections.Model(path=reward.model)
    return models


def check_model(key: str, path: str) -> None:
    """A path that can only be a folder must be one that holds a model; anything else may be a hub id.

    Raises:
        UserError: it is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{key}: {path} holds no config.json, so it is no Hugging Face model")
    elif path.startswith((".", "/", "~")) or path.count("/") != 1 or os.path.exists(path.split("/")[0]):
        raise UserError(f"{key}: no folder {path}")
