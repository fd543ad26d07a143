"""The promise: overlap changes when things happen, never what comes out (design: exactness at staleness 0)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conveyor.config import OnlineRecipe
from conveyor.run_folder import RunFolder
from tests.online.conftest import Finished, largest_difference

Make = Callable[..., OnlineRecipe]
Run = Callable[[OnlineRecipe], Finished]

PPO_SEVERAL_UPDATES = {"train.train_batch_size": 6, "algorithm.normalize": "update", "algorithm.update_epochs": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "changes"), [("ppo", PPO_SEVERAL_UPDATES), ("grpo", {})])
def test_overlap_on_and_off_are_equal_bit_for_bit(
    method: str, changes: dict[str, Any], make_recipe: Make, run: Run, tiny_policy: Path
) -> None:
    on = run(make_recipe(method, "on", changes))
    off = run(make_recipe(method, "off", changes | {"pipeline.overlap": False}))
    assert largest_difference(on.weights(), off.weights()) == 0
    for name in ("reward/mean", "loss/policy", "kl", "grad_norm", "response_length/mean"):
        assert [row[name] for row in on.rows] == [row[name] for row in off.rows]
    assert largest_difference(load_file(tiny_policy / "model.safetensors"), on.weights()) > 1e-3  # and training did something


@pytest.mark.slow
def test_completion_order_and_another_micro_batch_size_agree_closely(make_recipe: Make, run: Run) -> None:
    by_prompt = run(make_recipe("grpo", "prompt"))
    other = run(make_recipe("grpo", "completion", {"pipeline.order": "completion", "pipeline.micro_batch_size": 3}))
    assert by_prompt.rows[0]["grad_norm"] == pytest.approx(other.rows[0]["grad_norm"], rel=1e-6)
    assert largest_difference(by_prompt.weights(), other.weights()) < 1e-4


@pytest.mark.slow
def test_on_policy_ratio_is_one_and_the_engine_agrees_with_the_trainer_after_every_sync(make_recipe: Make, run: Run) -> None:
    rows = run(make_recipe("ppo", "ppo", {"train.steps": 4, "pipeline.verify_sync": True})).rows
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["ratio/max"] == 1.0 and row["clip_fraction"] == 0.0 and row["staleness/max"] == 0
        assert row["rollout_mismatch/max"] < 1e-5


@pytest.mark.slow
def test_two_zero3_ranks_equal_one_rank(make_recipe: Make, run: Run) -> None:
    """12 samples in micro-batches of 5, 5 and 2: a rank's shares are uneven, so are their numbers of tokens."""
    one = run(make_recipe("ppo", "one"))
    two = run(make_recipe("ppo", "two", {"devices": {"rollout": 1, "score": 1, "train": 2}, "train.zero_stage": 3}))
    assert largest_difference(one.weights(), two.weights()) < 1e-5
    assert one.rows[-1]["tokens"] == two.rows[-1]["tokens"]


@pytest.mark.slow
def test_staleness_stays_within_its_bound_and_is_used(make_recipe: Make, run: Run) -> None:
    rows = run(make_recipe("grpo", "stale", {"pipeline.max_staleness": 1, "train.steps": 4})).rows
    assert max(row["staleness/max"] for row in rows) == 1
    assert len(rows) == 4 and all(row["samples"] == 24 for row in rows if row["step"] % 3)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(make_recipe: Make, run: Run) -> None:
    whole = run(make_recipe("ppo", "whole", PPO_SEVERAL_UPDATES | {"train.steps": 4}))
    run(make_recipe("ppo", "parts", PPO_SEVERAL_UPDATES | {"train.steps": 4, "checkpoint.every": 2}))
    parts = make_recipe("ppo", "parts", PPO_SEVERAL_UPDATES | {"train.steps": 4, "checkpoint.every": 2, "checkpoint.resume": True})
    shutil.rmtree(RunFolder(parts.output_dir).checkpoints / "step_4")  # as if it had been killed in the third step
    resumed = run(parts)
    assert largest_difference(whole.weights(), resumed.weights()) == 0
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4]
    assert [row["reward/mean"] for row in whole.rows] == [row["reward/mean"] for row in resumed.rows]
