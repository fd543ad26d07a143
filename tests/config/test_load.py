"""A recipe is right, or the user gets one line that names the key."""

from pathlib import Path

import pytest
import yaml

from conveyor.config import OfflineRecipe, OnlineRecipe, UserError, load_recipe, parse_recipe
from conveyor.config.describe import keys

GRPO = {
    "method": "grpo",
    "output_dir": "runs/x",
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "rewards": [{"name": "rm", "model": "r"}],
}


def write(folder: Path, recipe: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    return path


def test_a_method_sets_its_defaults_and_the_recipe_overrides_them(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GRPO), {"rollout.n_samples_per_prompt": "4", "train.learning_rate": "2e-5"})
    assert isinstance(recipe, OnlineRecipe)
    assert recipe.algorithm.advantage_estimator == "group_norm" and recipe.algorithm.kl_in == "loss"
    assert recipe.rollout.n_samples_per_prompt == 4 and recipe.train.learning_rate == 2e-5
    assert recipe.placed_roles == ("rollout", "reference", "rm", "actor")


def test_the_reference_is_not_placed_without_kl() -> None:
    recipe = parse_recipe(GRPO | {"algorithm": {"kl_coef": 0}})
    assert isinstance(recipe, OnlineRecipe) and "reference" not in recipe.placed_roles


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"trian": {}}, "trian: unknown key; do you mean train?"),
        ({"train": {"stpes": 1}}, "train.stpes: unknown key; do you mean train.steps?"),
        ({"train": {"overlap": False}}, "train.overlap: unknown key; do you mean pipeline.overlap?"),
        ({"zzzzzzzz": 1}, "zzzzzzzz: unknown key"),
        ({"train": {"steps": "many"}}, "train.steps: Input should be a valid integer"),
        ({"train": {"steps": 0}}, "train.steps: Input should be greater than 0"),
        ({"method": "pop"}, "method: 'pop'; one of"),
        ({"rewards": []}, "rewards: "),
        ({"rewards": [{"name": "a"}]}, "rewards.a: give exactly one of model and function"),
        ({"rewards": [{"name": "a", "model": "x"}, {"name": "a", "model": "y"}]}, "rewards: two rewards are named a"),
        ({"rollout": {"n_samples_per_prompt": 1}}, "rollout.n_samples_per_prompt: group_norm compares"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p: samples would come from a truncated distribution"),
        ({"rollout": {"top_k": 20}}, "rollout.top_k: samples would come from a truncated distribution"),
        ({"train": {"train_batch_size": 12}}, "train.train_batch_size: must be a multiple of rollout.n_samples_per_prompt (8)"),
        ({"train": {"train_batch_size": 512}}, "train.train_batch_size: 512 samples are more than a step has (256)"),
        ({"pipeline": {"micro_batch_size": 300}}, "pipeline.micro_batch_size: larger than an update"),
        (
            {"devices": {"rollout": 1, "train": 1}},
            "devices: role reference is on score, which devices has not (rollout, train); place it: roles: {score: train}",
        ),
        ({"devices": {"rollout": 1, "train": 1}, "roles": {"score": "trian"}}, "roles.score: no device group trian"),
        ({"roles": {"judge": "score"}}, "roles.judge: no such role"),
        ({"rewards": [{"name": "actor", "model": "x"}]}, "rewards: actor is the name of a role"),
        ({"train": {"offload_optimizer": True}}, "train.offload_optimizer: needs train.zero_stage"),
        ({"algorithm": {"kl_in": "reward", "kl_estimator": "k3"}}, "algorithm.kl_estimator: in the reward only k1"),
        ({"train": {"steps": True}}, "train.steps: Input should be a valid integer"),
        ({"train": {"steps": "3"}}, "train.steps: Input should be a valid integer"),
        ({"train": {"learning_rate": True}}, "train.learning_rate: Input should be a number"),
        ({"train": {"adam_betas": [1.5, 0.9]}}, "train.adam_betas.0: Input should be less than 1"),
        ({"pipeline": {"overlap": "yes"}}, "pipeline.overlap: Input should be a valid boolean"),
        ({"rollout": {"stop": [""]}}, "rollout.stop.0: "),
        (
            {"data": {"path": "d", "eval_path": "e"}},
            "data.eval_path: grpo evaluates by sampling: name the held-out prompts",
        ),
        ({"devices": {"rollout": 1, "score": 1, "train": 1, "spare": 1}}, "devices.spare: no role is placed on this group"),
        ({"rewards": [{"name": "timeouts", "model": "x"}]}, "rewards: timeouts is the name of"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: "),
        ({"model": None}, "model: "),
    ],
)
def test_bad_settings_are_one_line_that_names_the_key(tmp_path: Path, changes: dict, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path, GRPO | changes))
    text = str(caught.value)
    assert f"recipe.yaml: {line}" in text and "\n" not in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "empty"),
        ("- a\n", "not one"),
        ("a: [1\n", "not valid YAML"),
        ("method: sft\n", "missing"),
        ("seed: 1\nseed: 2\n", "the key seed stands there twice"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_bad_override(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such recipe file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is not a section"):
        load_recipe(write(tmp_path, GRPO), {"method.x": "1"})
    with pytest.raises(UserError, match=r"rollout\.tmeperature: unknown key"):
        load_recipe(write(tmp_path, GRPO), {"rollout.tmeperature": "1"})


def test_a_number_may_come_as_text_as_yaml_reads_1e_6(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GRPO), {"train.learning_rate": "1e-6"})
    assert recipe.train.learning_rate == 1e-6


def test_list_entries_can_be_overridden(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GRPO), {"rewards.0.weight": "0.5"})
    assert isinstance(recipe, OnlineRecipe) and recipe.rewards[0].weight == 0.5


@pytest.mark.parametrize("path", sorted(Path("recipes").rglob("*.yaml")), ids=str)
def test_every_shipped_recipe_parses(path: Path) -> None:
    assert isinstance(load_recipe(path), OnlineRecipe | OfflineRecipe)


@pytest.mark.parametrize("method", ["sft", "reward_model", "ppo", "grpo"])
def test_every_key_says_what_it_means(method: str) -> None:
    described = keys(method)
    assert not [key.name for key in described if not key.help and key.name != "method"]
    assert len({key.name for key in described}) == len(described)
