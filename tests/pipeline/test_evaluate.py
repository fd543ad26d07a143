"""`conveyor evaluate`: what it makes of its arguments, without any model."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.config import UserError, load_recipe
from conveyor.pipeline.evaluate import _check_folder, add_arguments, evaluation_recipe
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("evaluate") / "policy")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    """A training's recipe, with much that an evaluation has no use for."""
    raw = {
        "method": "ppo", "output_dir": str(tmp_path / "run"), "model": {"path": "elsewhere"}, "data": {"path": "prompts.jsonl"},
        "rewards": [{"name": "judge", "model": "judges", "normalize": "running", "clip": 1},
                    {"name": "exact", "function": "exact_answer.py:reward"}],
        "evaluate": {"path": "held_out.jsonl", "success_reward": "exact", "greedy": True},
        "rollout": {"max_response_length": 8, "max_concurrent_requests": 2}, "train": {"rollout_batch_size": 8},
        "devices": {"rollout": 1, "train": 1, "judging": 1}, "roles": {"score": "train", "judge": "judging"},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "recipe.yaml"


def made(model: Path, *arguments: str, **overrides: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return evaluation_recipe(parser.parse_args([str(model), *arguments]), {key.replace("__", "."): text for key, text in overrides.items()})


def test_a_recipe_keeps_what_says_how_to_evaluate(model: Path, recipe: Path) -> None:
    found = made(model, "--recipe", str(recipe), evaluate__n_samples_per_prompt="4", evaluate__pass_at="[1, 4]")
    assert found.model.path == str(model) and found.evaluate.path == "held_out.jsonl" and found.evaluate.pass_at == (1, 4)
    assert [reward.name for reward in found.rewards] == ["judge", "exact"]
    assert all(reward.normalize == "none" and reward.clip is None for reward in found.rewards), "scales are the training's"
    assert found.devices == {"rollout": 1, "judging": 1} and found.role_group("judge") == "judging"
    assert found.rollout.max_concurrent_requests == 5, "room for the samples of a prompt and its greedy answer"
    assert not found.uses_reference and not found.uses_critic


def test_a_run_is_evaluated_by_its_own_recipe(model: Path, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    given = load_recipe(recipe).model_dump(mode="json")
    (run / "config.yaml").write_text(yaml.safe_dump(given))
    assert made(run).model.path == str(run / "model")


RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "tiny").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_evaluated(model: Path, file: Path) -> None:
    given = load_recipe(file)
    if not getattr(given, "rewards", ()):
        with pytest.raises(UserError, match=r"name (one|prompts and a reward) with"):
            made(model, "--recipe", str(file), "--data", "held_out.jsonl")
    found = made(model, "--recipe", str(file), "--data", "held_out.jsonl", "--reward", "a.py:right")
    assert found.rewards[0].name == "right" and found.role_group("actor") == found.role_group("rollout")
    if getattr(given, "rewards", ()):
        kept = made(model, "--recipe", str(file), "--data", "held_out.jsonl")
        assert [reward.name for reward in kept.rewards] == [reward.name for reward in given.rewards]  # type: ignore[union-attr]


def test_functions_of_one_name_are_told_apart_by_their_files(model: Path) -> None:
    found = made(model, "--data", "x", "--reward", "a.py:reward", "--reward", "sub/b.py:reward")
    assert [reward.name for reward in found.rewards] == ["a_reward", "b_reward"]


def test_prompts_and_a_reward_are_enough(model: Path, tmp_path: Path) -> None:
    found = made(model, "--data", "held_out.jsonl", "--reward", "a.py:right", "--reward", "b.py:style")
    assert [(reward.name, reward.function) for reward in found.rewards] == [("right", "a.py:right"), ("style", "b.py:style")]
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert found.data.max_prompt_length + found.rollout.max_response_length <= limit
    assert made(model, "--data", "x", "--reward", "a.py:f", devices__rollout="1").devices == {"rollout": 1}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"train.steps": "3"}, "--train.steps: an evaluation has no such key"),
        ({"method": "ppo"}, "--method: an evaluation has no such key"),
        ({"evaluate.n_samples_per_prompt": "abc"}, "evaluate: evaluate.n_samples_per_prompt: "),
        ({"evaluate": "3"}, "evaluate: evaluate: "),
        ({"rewards": "x"}, "evaluate: rewards: "),
        ({"rewards.3.weight": "2"}, "--rewards.3.weight: rewards has 1 entries"),
        ({"seed.x": "1"}, "evaluate: seed: Input should be a valid integer"),
        ({"rollout": "3"}, "evaluate: rollout: "),
        ({"devices": "3"}, "evaluate: devices: "),
        ({"roles": "x"}, "evaluate: roles: "),
        ({"evaluate.pass_at": "[8]"}, "evaluate: evaluate.pass_at: pass@8 needs as many samples"),
        ({"evaluate.success_reward": "none"}, "evaluate: evaluate.success_reward: no reward is named none"),
    ],
)
def test_bad_keys_are_one_line(model: Path, overrides: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        made(model, "--data", "x", "--reward", "a.py:f", **{key.replace(".", "__"): text for key, text in overrides.items()})
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_nothing_to_evaluate_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a recipe with --recipe, or prompts and a reward"):
        made(model, "--data", "x")
    (tmp_path / "sft.yaml").write_text("method: sft\noutput_dir: o\nmodel: {path: m}\ndata: {path: d}\n")
    with pytest.raises(UserError, match="method sft does not sample"):
        made(model, "--recipe", str(tmp_path / "sft.yaml"))
    assert made(model, "--recipe", str(tmp_path / "sft.yaml"), "--data", "x", "--reward", "a.py:f").evaluate.path == "x"


def test_a_training_run_is_never_replaced(tmp_path: Path) -> None:
    for name in ("model", "checkpoints", "critic"):
        (tmp_path / name / name).mkdir(parents=True)
        (tmp_path / name / name / "file").touch()
        with pytest.raises(UserError, match="holds a run"):
            _check_folder(tmp_path / name)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds a run"):
        _check_folder(tmp_path)
    of_an_evaluation = tmp_path / "evaluation"
    of_an_evaluation.mkdir()
    for name in ("evaluation.json", "evaluations.jsonl", "held_out_samples.jsonl"):
        (of_an_evaluation / name).write_text("{}\n")
    (of_an_evaluation / "metrics.jsonl").touch()
    _check_folder(of_an_evaluation)
