"""How each method spends the budget: 512 prompts with 8 samples each, judged by the true reward.

Offline methods share one set of samples of the SFT policy. Methods in rounds take 128 prompts a round, from the policy of the round.
PPO takes 256 prompts a step, one sample each, in 16 steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.world.truth import true_reward
from benchmarks.world.world import MAX_PROMPT, MAX_RESPONSE, PROMPTS, SAMPLES, Row, World
from conveyor.checks import check_online
from conveyor.config import LoopRecipe, OnlineRecipe, parse_recipe
from conveyor.loops.run import run_loop
from conveyor.pipeline.loop import run_placed
from conveyor.pipeline.sampling import Sampled
from conveyor.workers.placement import Placement

ROUNDS = 4
TRAIN: dict[str, Any] = {"micro_batch_size": 64, "lr_schedule": "constant", "warmup_ratio": 0.05}
DPO = TRAIN | {"train_batch_size": 64, "learning_rate": 1e-4}
SFT = TRAIN | {"train_batch_size": 64, "learning_rate": 3e-4}
CONDITION = "{prompt} [{condition}]"
TARGET = 1.0
"""Standard deviations above the mean, asked for at inference; a right answer has about 0.9, written without decimals."""


def offline_data(world: World, samples: Sequence[Sampled]) -> None:
    """The files of the offline methods, from 8 judged samples of every prompt: pairs of every two in the order they were drawn that differ
    in reward, and each completion with its reward, desirable where that is above the mean of its prompt's, and where nothing is wrong."""
    pairs: list[Row] = []
    judged: list[Row] = []
    for sampled in samples:
        prompt, texts = sampled.prompt.text, [rollout.text for rollout in sampled.rollouts]
        of_prompt = [true_reward(text, sampled.prompt.columns["answer"]) for text in texts]
        mean = statistics.fmean(of_prompt)
        for text, score in zip(texts, of_prompt, strict=True):
            if text:
                judged.append({"prompt": prompt, "completion": text, "label": score > mean or score == 1, "reward": score})
        for a in range(0, len(texts), 2):
            better, worse = (a, a + 1) if of_prompt[a] >= of_prompt[a + 1] else (a + 1, a)
            if of_prompt[better] > of_prompt[worse] and texts[worse]:
                pairs.append({"prompt": prompt, "chosen": texts[better], "rejected": texts[worse]})
    world.write("judged", judged)
    world.write("pairs", pairs)
    world.write("chosen", ({"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs))


def _offline(world: World, name: str, data: str, **settings: Any) -> None:
    world.train(name, {"data": {"path": str(world.data(data)), "max_length": 64, "packing": False}, **settings})


def sft(world: World, engine: Any) -> None:
    _offline(world, "sft_chosen", "chosen", method="sft", train=SFT)


def dpo(world: World, engine: Any) -> None:
    _offline(world, "dpo", "pairs", method="dpo", dpo={"beta": 0.1}, train=DPO | {"epochs": 2})


def kto(world: World, engine: Any) -> None:
    _offline(world, "kto", "judged", method="kto", kto={"beta": 0.1}, train=DPO | {"epochs": 1})


def conditional_sft(world: World, engine: Any) -> None:
    condition = {"kind": "score", "template": CONDITION, "target": TARGET, "decimals": 0}
    _offline(world, "conditional_sft", "judged", method="conditional_sft", condition=condition, train=SFT | {"epochs": 2})


def _loop(world: World, engine: Any, name: str, rounds: int, **settings: Any) -> None:
    recipe = parse_recipe(_sampling(world, name) | {
        "method": name, "rollout": {"n_samples_per_prompt": SAMPLES, "max_response_length": MAX_RESPONSE},
        "rounds": {"count": rounds, "prompts": PROMPTS // rounds}, **settings,
    })  # fmt: skip
    assert isinstance(recipe, LoopRecipe)
    run_loop(recipe, [engine])


def rejection_sampling(world: World, engine: Any) -> None:
    _loop(world, engine, "rejection_sampling", ROUNDS, select={"keep": 2}, train=SFT | {"epochs": 1})


def rso(world: World, engine: Any) -> None:
    select = {"accept": 4, "beta": 0.5, "pairing": "tournament"}
    _loop(world, engine, "rso", 1, select=select, dpo={"beta": 0.1}, train=DPO | {"epochs": 2})


def iterative_dpo(world: World, engine: Any) -> None:
    select = {"pairs": "all", "max_pairs": 4}
    _loop(world, engine, "iterative_dpo", ROUNDS, select=select, dpo={"beta": 0.1}, train=DPO | {"epochs": 1})


def ppo(world: World, engine: Any) -> None:
    steps, prompts = 16, PROMPTS * SAMPLES // 16
    recipe = parse_recipe(_sampling(world, "ppo") | {
        "method": "ppo", "rollout": {"max_response_length": MAX_RESPONSE},
        "algorithm": {"kl_coef": 0.02, "normalize": "streaming_exact"},
        "train": {"rollout_batch_size": prompts, "steps": steps, "learning_rate": 3e-4,
                  "critic_learning_rate": 1e-3},
        "pipeline": {"micro_batch_size": 64},
    })  # fmt: skip
    assert isinstance(recipe, OnlineRecipe)
    order = check_online(recipe)
    with Placement.create({"rollout": 1, "train": 1}, recipe.ray) as placement:
        run_placed(recipe, order, placement, engines=[engine])


def _sampling(world: World, name: str) -> dict[str, Any]:
    return {
        "seed": world.seed, "output_dir": str(world.path / name), "overwrite": True, "model": {"path": str(world.sft)},
        "data": {"path": str(world.data("prompts")), "max_prompt_length": MAX_PROMPT},
        "rewards": [{"name": "true", "function": "benchmarks/world/truth.py:reward"}],
        "devices": {"rollout": 1, "train": 1}, "roles": {"score": "train"},
    }  # fmt: skip


METHODS: dict[str, tuple[Callable[[World, Any], None], str]] = {
    "sft": (sft, "sft_chosen"),
    "dpo": (dpo, "dpo"),
    "kto": (kto, "kto"),
    "conditional_sft": (conditional_sft, "conditional_sft"),
    "rejection_sampling": (rejection_sampling, "rejection_sampling"),
    "rso": (rso, "rso"),
    "iterative_dpo": (iterative_dpo, "iterative_dpo"),
    "ppo": (ppo, "ppo"),
}
"""Method → (what trains it, its folder's name in the world's)."""


def model_of(world: World, method: str) -> Path:
    return world.path / METHODS[method][1] / "model"
