"""Everything that can be known to be wrong before a model is loaded: `conveyor check`, and the start of every run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available

from conveyor.config import OnlineRecipe, UserError, sections
from conveyor.config.common import Common
from conveyor.data.completions import Completed, load_completions
from conveyor.data.mixture import Mixture
from conveyor.data.prompts import PromptOrder, load_prompts
from conveyor.data.tokenizer import check_folder_or_hub_id, load_tokenizer
from conveyor.episodes.functions import load_rollout_function
from conveyor.models.adapters import check_lora
from conveyor.models.liger import check_liger
from conveyor.models.rope import longest_positions
from conveyor.models.routing import check_routers
from conveyor.models.zero import check_nvme
from conveyor.rewards.functions import GIVEN, check_columns, load_function
from conveyor.run_folder import RunFolder
from conveyor.types import Prompt
from conveyor.workers.cluster import SMALLEST_STORE_GIB, available, check_devices, default_devices

OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]")
"""In the name of an architecture: it has another head than that of a language model."""
Functions = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
"""Where the recipe names it → (reward function, its further arguments)."""


def check_online(recipe: OnlineRecipe) -> PromptOrder:
    """Checks folders, files, tokenizer, rows, reward functions and devices; changes nothing.

    Returns:
        The prompts in the order of the run, which only a sound recipe has.

    Raises:
        UserError: the first thing that is wrong.
    """
    functions = _check_settings(recipe)
    check_offload(recipe)
    tokenizer = load_tokenizer(recipe.model)
    prompts = load_prompts(recipe.data, tokenizer)
    _check_columns(recipe, functions, prompts)
    _check_columns(recipe, functions, load_held_out(recipe, tokenizer), ", for evaluate.path")
    if recipe.ptx is not None:
        Mixture.read(recipe, tokenizer)
    if recipe.method == "distillation":
        _check_teacher(recipe, tokenizer)
    train = recipe.train
    order = PromptOrder(
        prompts, train.rollout_batch_size, epochs=train.epochs, steps=train.steps, shuffle=recipe.data.shuffle, seed=recipe.seed,
        drop_last=recipe.data.drop_last,
    )  # fmt: skip
    if len(order) == 0:
        raise UserError("train.steps: nothing to do")
    return order


def check_held_out(recipe: OnlineRecipe, template: str | None = None) -> list[Prompt]:
    """What an evaluation without training needs; returns its prompts, under a condition if there is a `template`.

    Raises:
        UserError: the first thing that is wrong.
    """
    functions = _check_settings(recipe)
    held_out = load_held_out(recipe, template=template)
    _check_columns(recipe, functions, held_out, ", for evaluate.path")
    return held_out


def check_sampling(recipe: OnlineRecipe, template: str | None = None) -> list[Prompt]:
    """The same for the prompts of `data.path`; rewards may be missing."""
    functions = _check_settings(recipe)
    prompts = load_prompts(recipe.data, load_tokenizer(recipe.model), template=template)
    _check_columns(recipe, functions, prompts)
    return prompts


def check_scoring(recipe: OnlineRecipe) -> list[Completed]:
    """What scoring responses needs; returns those of `data.path`. Without a model in `model.path` there is no tokenizer.

    Raises:
        UserError: the first thing that is wrong.
    """
    RunFolder.check(recipe)
    models = {key: model for key, model in _models(recipe).items() if model.path}
    for key, model in models.items():
        check_folder_or_hub_id(key, model.path)
    functions = _reward_functions(recipe)
    _check_tokens(recipe)
    _check_heads(recipe)
    check_devices(planned_devices(recipe), available(recipe.ray), placement=recipe.ray.placement)
    limits = [
        limit
        for key, model in models.items()
        if key != "model.path" and (limit := getattr(read_model_config(key, model.path), "max_position_embeddings", None)) is not None
    ]
    tokenizer = load_tokenizer(recipe.model) if recipe.model.path else None
    completions = load_completions(recipe.data, tokenizer, limit=min(limits, default=None))
    _check_columns(recipe, functions, completions)
    return completions


def _check_settings(recipe: OnlineRecipe) -> Functions:
    """All that needs no data; returns the reward functions."""
    RunFolder.check(recipe)
    for key, model in _models(recipe).items():
        check_folder_or_hub_id(key, model.path)
    functions = _reward_functions(recipe)
    _check_tokens(recipe)
    _check_writers(recipe)
    _check_attention(recipe)
    _check_heads(recipe)
    _check_lengths(recipe)
    _check_experts(recipe)
    _check_lora(recipe)
    check_devices(planned_devices(recipe), available(recipe.ray), devices_per_worker(recipe), recipe.ray.placement)
    _check_rows_over_ranks(recipe)
    return functions


def _check_rows_over_ranks(recipe: OnlineRecipe) -> None:
    of_row, devices = recipe.train.sequence_parallel_size, planned_devices(recipe)
    for group in dict.fromkeys(recipe.role_group(role) for role in (("actor", "critic") if recipe.uses_critic else ("actor",))):
        if max(1, int(devices[group])) % of_row:
            raise UserError(f"train.sequence_parallel_size: {of_row} does not divide the {devices[group]:g} devices of group {group}")


def _check_columns(recipe: OnlineRecipe, functions: Functions, prompts: Sequence[Prompt], where: str = "") -> None:
    """Functions take what these prompts have."""
    if not prompts:
        return
    columns, turns = prompts[0].columns, recipe.rollout.multi_turn
    if turns is not None:  # which may tell reward functions more columns, that only it knows
        load_rollout_function(turns.function, f"rollout.multi_turn.function{where}", columns)
        return
    for key, (function, arguments) in functions.items():
        check_columns(function, f"{key}{where}", columns, (*GIVEN, *arguments))


def _reward_functions(recipe: OnlineRecipe) -> Functions:
    return {
        key: (load_function(reward.function, key, reward.arguments), reward.arguments)
        for reward in recipe.rewards
        if reward.function is not None and (key := f"rewards.{reward.name}.function")
    }


def _check_heads(recipe: OnlineRecipe) -> None:
    """Models that are to score have a score layer; of folders with safetensors, others tell when they are loaded."""
    scoring = {f"rewards.{reward.name}.model": reward.model for reward in recipe.model_rewards}
    if recipe.critic is not None:
        scoring["critic.path"] = recipe.critic.path
    for key, path in scoring.items():
        files = list(Path(str(path)).expanduser().glob("*.safetensors"))
        names = [name for file in files for name in _tensor_names(file)]
        if names and not any(name.startswith("score.") for name in names):
            raise UserError(f"{key}: {path} has no score layer, so its scores would be random; train a reward model from it first")


def _check_experts(recipe: OnlineRecipe) -> None:
    check_routers(read_model_config("model.path", recipe.model.path), recipe.train, recipe.rollout.routing_replay)
    if recipe.rollout.routing_replay and available(recipe.ray).kind == "CPU":
        raise UserError("rollout.routing_replay: vLLM tells the experts of its tokens on GPUs only, and here are none")


def _check_writers(recipe: OnlineRecipe) -> None:
    """Policy and reference are language models, as far as their configurations tell: a reward model samples nothing."""
    for key in ("model.path", "reference.path"):
        if (model := _models(recipe).get(key)) is not None:
            names = read_model_config(key, model.path).architectures or []
            if others := [name for name in names if OTHER_HEAD.search(name)]:
                raise UserError(f"{key}: {model.path} is a {others[0]}, not a language model that writes text")


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError):  # said when it is loaded
        return []


def _check_tokens(recipe: OnlineRecipe) -> None:
    for reward in recipe.rewards:
        if reward.token_variable is not None and not os.environ.get(reward.token_variable):
            raise UserError(f"rewards.{reward.name}.token_variable: the environment has no {reward.token_variable}")


def _check_teacher(recipe: OnlineRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """The teacher reads the student's token ids, so it must have been trained with the same vocabulary."""
    assert recipe.reference is not None
    if load_tokenizer(recipe.reference).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"reference.path: the teacher {recipe.reference.path} has another vocabulary than {recipe.model.path}")


def load_held_out(recipe: OnlineRecipe, tokenizer: PreTrainedTokenizerBase | None = None, template: str | None = None) -> list[Prompt]:
    """The prompts of `evaluate`; their indices are negative, so that no group of the run is taken for one of them."""
    if recipe.evaluate is None:
        return []
    tokenizer, source = tokenizer or load_tokenizer(recipe.model), recipe.evaluate.path
    prompts = load_prompts(recipe.data, tokenizer, path=source, key="evaluate.path", template=template)
    return [replace(prompt, index=-1 - i) for i, prompt in enumerate(prompts[: recipe.evaluate.max_prompts])]


def read_model_config(key: str, path: str) -> Any:
    """The configuration of a model's text part, without loading the model.

    Raises:
        UserError: names the key; the folder holds no weights, or no configuration can be read.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise UserError(f"{key}: {folder} holds no weights (*.safetensors or *.bin)")
    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: no model configuration can be read from {path}: {str(error).splitlines()[0]}") from None


def _check_lengths(recipe: OnlineRecipe) -> None:
    asked = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    for key, model in _models(recipe).items():
        limit = longest_positions(read_model_config(key, model.path), model.rope_scaling)
        if limit is not None and asked > limit:
            raise UserError(
                f"rollout.max_response_length: {recipe.rollout.max_response_length}, with data.max_prompt_length "
                f"{recipe.data.max_prompt_length}, is more than the {limit} tokens that {model.path} takes"
            )


def _has_flash_attention(recipe: OnlineRecipe) -> bool:
    """On this machine, or installed where the GPUs are those of other machines: a cluster's head may have none."""
    return is_flash_attn_2_available() or (find_spec("flash_attn") is not None and available(recipe.ray).kind == "GPU")


def _check_attention(recipe: OnlineRecipe) -> None:
    for key, model in {"model": recipe.model, "reference": recipe.reference, "critic": recipe.critic}.items():
        if model is not None and model.attention == "flash_attention_2" and not _has_flash_attention(recipe):
            raise UserError(f"{key}.attention: flash_attention_2 needs the package flash-attn and a GPU; use sdpa")
        if model is not None:
            check_liger(model.liger)


def check_offload(recipe: Common) -> None:
    """What is to be offloaded can be, if it is this machine that trains; machines of a cluster tell when they load their models."""
    if not (recipe.ray.address or os.environ.get("RAY_ADDRESS")):
        check_nvme(recipe.train)


def _check_lora(recipe: OnlineRecipe) -> None:
    if recipe.lora is not None:
        check_lora(read_model_config("model.path", recipe.model.path), recipe.lora)


def planned_devices(recipe: OnlineRecipe) -> dict[str, float]:
    """The recipe's device groups, or those of what is there."""
    return dict(recipe.devices or default_devices(recipe))


def devices_per_worker(recipe: OnlineRecipe) -> dict[str, int]:
    """Device group → devices of one of its workers, where that is not one."""
    return {recipe.role_group("rollout"): recipe.rollout.tensor_parallel_size}


def store_gib(recipe: OnlineRecipe) -> float:
    """Object store for two versions of the weights of actor and critic snapshot, one more that a reference is to take, and half a GiB
    for the samples.

    A hub id's size is not known before it is loaded. Files may hold half the bytes of the trained weights.
    """
    published = ["actor", *(role for role in recipe.snapshot_roles if role == "critic_snapshot")]
    folder = Path(recipe.model.path).expanduser()
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    versions = 2 * len(published) + (recipe.algorithm.reference_refresh is not None)
    return SMALLEST_STORE_GIB + versions * 2 * files / 2**30


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
