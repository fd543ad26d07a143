"""Everything that can be known to be wrong before a model is loaded: `conveyor check`, and the start of every run."""

from __future__ import annotations

from conveyor.config import OnlineRecipe, UserError, sections
from conveyor.data.prompts import PromptOrder, load_prompts
from conveyor.data.tokenizer import check_folder_or_hub_id, load_tokenizer
from conveyor.rewards.functions import check_columns, load_function
from conveyor.run_folder import RunFolder
from conveyor.workers.placement import available, check_devices, default_devices


def check_online(recipe: OnlineRecipe) -> PromptOrder:
    """Checks folders, files, tokenizer, rows, reward functions and devices; changes nothing.

    Returns:
        The prompts in the order of the run, which only a sound recipe has.

    Raises:
        UserError: the first thing that is wrong.
    """
    RunFolder.check(recipe)
    for key, model in _models(recipe).items():
        check_folder_or_hub_id(key, model.path)
    functions = {
        key: load_function(reward.function, key)
        for reward in recipe.rewards
        if reward.function is not None and (key := f"rewards.{reward.name}.function")
    }
    check_devices(planned_devices(recipe), available(recipe.ray), devices_per_worker(recipe))
    tokenizer = load_tokenizer(recipe.model)
    prompts = load_prompts(recipe.data, tokenizer)
    for key, function in functions.items():
        check_columns(function, key, prompts[0].columns)
    train = recipe.train
    order = PromptOrder(
        prompts, train.rollout_batch_size, epochs=train.epochs, steps=train.steps, shuffle=recipe.data.shuffle, seed=recipe.seed,
        drop_last=recipe.data.drop_last,
    )  # fmt: skip
    if len(order) == 0:
        raise UserError("train.steps: nothing to do")
    return order


def planned_devices(recipe: OnlineRecipe) -> dict[str, float]:
    """The recipe's device groups, or those of what is there."""
    return dict(recipe.devices or default_devices(recipe))


def devices_per_worker(recipe: OnlineRecipe) -> dict[str, int]:
    """Device group → devices of one of its workers, where that is not one."""
    return {recipe.role_group("rollout"): recipe.rollout.tensor_parallel_size}


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
