"""The promise: overlap changes when things happen, never what comes out (design: exactness at staleness 0)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conveyor.pipeline.parity import compare
from conveyor.report.events import read_events
from conveyor.run_folder import RunFolder
from tests.online.conftest import Finished, Make, Run, largest_difference

PPO_SEVERAL_UPDATES = {"train.steps": 4, "train.train_batch_size": 6, "algorithm.normalize": "update", "algorithm.update_epochs": 2}


@pytest.fixture(scope="module")
def ppo(make_in: Make, start: Run, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What others are compared with: overlapped, uninterrupted."""
    return start(make_in(tmp_path_factory.mktemp("runs"), "ppo", "ppo", PPO_SEVERAL_UPDATES), cold=True)


@pytest.fixture(scope="module")
def grpo(make_in: Make, start: Run, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What others are compared with: overlapped, in prompt order, without evaluation."""
    return start(make_in(tmp_path_factory.mktemp("runs"), "grpo", "grpo"))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "changes"), [("ppo", PPO_SEVERAL_UPDATES), ("grpo", {})])
def test_overlap_on_and_off_are_equal_bit_for_bit(
    method: str, changes: dict[str, Any], make_recipe: Make, run: Run, tiny_policy: Path, request: pytest.FixtureRequest
) -> None:
    on = request.getfixturevalue(method)
    off = run(make_recipe(method, "off", changes | {"pipeline.overlap": False}))
    found = compare(off.folder, on.folder, tolerance=0.0)
    assert found.holds and found.parameters.largest == found.gradient.largest == 0
    assert set(found.metrics.values()) == {0.0} and "loss/policy" in found.metrics and found.samples_differing == 0 < found.samples
    for name in ("reward/mean", "loss/policy", "kl", "grad_norm", "response_length/mean"):
        assert [row[name] for row in on.rows] == [row[name] for row in off.rows]
    assert largest_difference(load_file(tiny_policy / "model.safetensors"), on.weights()) > 1e-3  # and training did something


@pytest.mark.slow
def test_completion_order_and_another_micro_batch_size_agree_closely(grpo: Finished, make_recipe: Make, run: Run) -> None:
    other = run(make_recipe("grpo", "completion", {"pipeline.order": "completion", "pipeline.micro_batch_size": 3}))
    found = compare(grpo.folder, other.folder, tolerance=1e-4)
    assert found.gradient.relative < 1e-6 and found.parameters.relative < 1e-4 and found.holds
    assert found.parameters.largest > 0, "the order of the sums is another, so some bit differs"
    assert not compare(grpo.folder, other.folder, tolerance=0.0).holds


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
def test_whitening_while_streaming_equals_whitening_behind_the_barrier(make_recipe: Make, run: Run) -> None:
    """The barrier's advantages come from snapshots of the same weights, so the gradient is the same but for rounding."""
    barrier = run(make_recipe("ppo", "barrier", {"algorithm.normalize": "update", "train.steps": 2}))
    streaming = run(make_recipe("ppo", "streaming", {"algorithm.normalize": "streaming_exact", "train.steps": 2}))
    found = compare(barrier.folder, streaming.folder, tolerance=1e-4)
    assert found.holds and found.gradient.relative < 1e-5
    assert [row["loss/policy"] for row in streaming.rows] == pytest.approx([row["loss/policy"] for row in barrier.rows], abs=1e-5)
    samples = [[json.loads(line)["advantage"] for line in run.folder.samples.read_text().splitlines()] for run in (barrier, streaming)]
    assert samples[1] == pytest.approx(samples[0], abs=1e-4)


@pytest.mark.slow
def test_evaluation_in_bubbles_changes_no_bit_of_the_training(grpo: Finished, make_recipe: Make, run: Run, prompts_file: Path) -> None:
    evaluate = {"evaluate": {"path": str(prompts_file), "max_prompts": 6, "n_samples_per_prompt": 2}}
    evaluated = run(make_recipe("grpo", "evaluated", evaluate))
    assert largest_difference(grpo.weights(), evaluated.weights()) == 0
    lines = [json.loads(line) for line in evaluated.folder.evaluations.read_text().splitlines()]
    assert [line["version"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["eval/coverage"] == 1 and lines[-1]["eval/samples"] == 12
    for line in lines:
        assert line["eval/reward/mean"] is None or line["eval/reward/mean"] == pytest.approx(
            line["eval/reward/vowels"] + 0.5 * line["eval/reward/judge"], abs=1e-6
        )


@pytest.mark.slow
def test_a_run_killed_with_groups_in_flight_trains_every_group_once(make_recipe: Make, run: Run) -> None:
    """Staleness 1 by completion: what a checkpoint leaves untrained is not the end of the prompt order."""
    changes = {"pipeline.max_staleness": 1, "pipeline.order": "completion", "train.steps": 6, "checkpoint.every": 2, "checkpoint.keep": 9}
    run(make_recipe("grpo", "parts", changes))
    resumed = make_recipe("grpo", "parts", changes | {"checkpoint.resume": True})
    for step in (4, 6):
        shutil.rmtree(RunFolder(resumed.output_dir).checkpoints / f"step_{step}")
    finished = run(resumed)
    rows = [json.loads(line) for line in finished.folder.samples.read_text().splitlines()]
    assert sorted((row["group"], row["sample"]) for row in rows) == [(group, k) for group in range(36) for k in range(4)]
    assert [sum(row["step"] == step for row in rows) for step in range(1, 7)] == [24] * 6
    assert all(0 <= row["step"] - 1 - row["version"] <= 1 for row in rows)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(ppo: Finished, make_recipe: Make, run: Run) -> None:
    changes = PPO_SEVERAL_UPDATES | {"checkpoint.every": 2}
    run(make_recipe("ppo", "parts", changes))
    parts = make_recipe("ppo", "parts", changes | {"checkpoint.resume": True})
    shutil.rmtree(RunFolder(parts.output_dir).checkpoints / "step_4")  # as if it had been killed in the third step
    resumed = run(parts, cold=True)
    assert largest_difference(ppo.weights(), resumed.weights()) == 0
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4]
    assert [row["reward/mean"] for row in ppo.rows] == [row["reward/mean"] for row in resumed.rows]


@pytest.mark.slow
def test_everything_on_one_group_asleep_in_turns_is_equal_bit_for_bit(grpo: Finished, make_recipe: Make, run: Run) -> None:
    """Engine, reward model, reference and trainer leave the memory of one device to one another."""
    merged = {"devices": {"train": 1}, "roles": {"rollout": "train", "score": "train"}, "pipeline.sleep": True}
    asleep = run(make_recipe("grpo", "asleep", merged))
    found = compare(asleep.folder, grpo.folder, tolerance=0.0)
    assert found.holds and found.parameters.largest == found.gradient.largest == 0 and found.samples_differing == 0 < found.samples
    moves = [(event.worker, event.task) for event in read_events(asleep.folder.events) if event.task in ("sleep", "wake")]
    assert moves[:4] == [("train 0", "sleep"), ("rollout train 0", "wake"), ("rollout train 0", "sleep"), ("score train 0", "wake")]
    assert moves[-2:] == [("rollout train 0", "sleep"), ("train 0", "wake")], "the trainer saves the model"
