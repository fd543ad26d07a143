"""Costs come back from a run that was simulated with them."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from conveyor.config import UserError
from conveyor.pipeline.run_plan import run_plan
from conveyor.plan.costs import Linear, TaskCosts, TrainerCosts
from conveyor.plan.engines import Iterations
from conveyor.plan.fit import Profile, fit, fit_linear, for_parts, validate
from conveyor.plan.lengths import Workload
from conveyor.plan.record import read_run
from conveyor.plan.simulate import simulate
from tests.plan.recipes import raw, recipe

TRUE = TaskCosts(
    Iterations(constant=0.02, per_sample=0.0015),
    {"judge+reference": Linear(0.03, per_token=2e-4)},
    {"actor+critic": TrainerCosts(Linear(0.05, per_token=4e-4), Linear(0.002, per_token=1e-6), update=0.2, publish=0.1, finish=0)},
    engine_install=0.15,
    latency=0.004,
)
ROLES = {"rollout": 2, "score": 1, "train": 2}


def write_run(folder: Path, costs: TaskCosts = TRUE, lengths: str = "lognormal:mean=60,sigma=0.7", steps: int = 4, **pipeline) -> Path:
    """The folder of a run that took exactly the times of `costs`."""
    made = raw(devices=ROLES, roles={}, pipeline=pipeline, rollout={"max_concurrent_requests": 8})
    parsed = recipe(devices=ROLES, roles={}, pipeline=pipeline, rollout={"max_concurrent_requests": 8})
    plan = run_plan(parsed, [32] * steps, ROLES)
    key = "+".join(plan.parts[0].roles)
    costs = TaskCosts(costs.engine, {key: costs.scorers["judge+reference"]}, costs.trainers, costs.engine_install, 0.0, costs.latency)
    workload = Workload.draw(lengths, 32 * steps, 1, prompt=20)
    run = simulate(plan, costs, workload, ROLES)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    _lines(folder / "events.jsonl", [asdict(event) for event in run.events])
    sizes = [[workload.at(group, 0) for group in range(32 * step, 32 * step + 32)] for step in range(steps)]
    _lines(folder / "metrics.jsonl", [{"step": n + 1, "tokens": sum(s.response for s in of_step)} for n, of_step in enumerate(sizes)])
    rows = [
        {"step": n + 1, "group": 32 * n + i, "sample": 0, "prompt": "p" * size.prompt, "response": "r" * (size.response - 1)}
        for n, of_step in enumerate(sizes)
        for i, size in enumerate(of_step)
    ]
    _lines(folder / "samples.jsonl", rows)
    return folder


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_costs_of_a_simulated_run_are_found_again(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.devices == ROLES
    assert run.step_groups == (32,) * 4
    found = fit(run)
    (score,), trainer, true = found.scorers.values(), found.trainers["actor+critic"], TRUE.trainers["actor+critic"]
    assert (score.constant, score.per_token) == pytest.approx((0.03, 2e-4), rel=1e-6)
    assert (trainer.train.constant, trainer.train.per_token) == pytest.approx((true.train.constant, true.train.per_token), rel=1e-6)
    assert (trainer.update, trainer.publish, found.engine_install) == pytest.approx((0.2, 0.1, 0.15), rel=1e-6)
    assert found.latency == pytest.approx(0.004, rel=1e-6)
    # A full engine's iteration is what most of the run shows; what of it is due to each sample shows less.
    assert found.engine.seconds(8, 0) == pytest.approx(0.032, rel=0.01)
    assert found.engine.seconds(1, 0) == pytest.approx(0.0215, rel=0.05)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_is_predicted_from_its_own_costs(tmp_path: Path, staleness: int) -> None:
    result = validate(read_run(write_run(tmp_path / "run", steps=6, max_staleness=staleness)))
    assert abs(result.step_error) < 0.02
    for group, share in result.measured.idle.items():
        assert result.predicted.idle[group] == pytest.approx(share, abs=0.02)


def test_a_slope_that_does_not_show_is_taken_for_proportional() -> None:
    samples, seconds = np.full(5, 4.0), np.array([1.0, 1.1, 0.9, 1.05, 0.95])
    assert fit_linear(samples, np.full(5, 100.0), seconds) == Linear(per_token=0.01)
    assert fit_linear(samples, np.array([99.0, 101, 98, 100, 102]), seconds) == Linear(per_token=0.01)


def test_what_does_not_depend_on_tokens_is_proportional_to_samples() -> None:
    found = fit_linear(np.full(5, 4.0), np.array([100.0, 300, 50, 220, 80]), np.full(5, 2.0))
    assert found == Linear(per_sample=0.5)


def test_a_slope_that_shows_is_told_from_the_constant() -> None:
    tokens = np.array([100.0, 200, 300, 400])
    found = fit_linear(np.full(4, 8.0), tokens, 0.5 + 0.01 * tokens)
    assert (found.constant, found.per_token) == pytest.approx((0.5, 0.01))


def test_a_profile_shares_work_among_other_ranks(tmp_path: Path) -> None:
    profile = Profile.of(read_run(write_run(tmp_path / "run")))
    other = profile.costs(recipe(devices={"rollout": 2, "train": 4}, roles={"score": "train"}))
    train = other.trainers["actor+critic"].train
    assert (train.constant, train.per_token) == pytest.approx((0.05, 2e-4), rel=1e-6)
    with pytest.raises(UserError, match="no tasks of actor"):
        profile.costs(recipe("grpo", devices={"rollout": 2, "train": 4}, roles={"score": "train"}))


def test_a_folder_without_a_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        read_run(tmp_path)
    folder = write_run(tmp_path / "run")
    events = [json.loads(line) | {"samples": []} for line in (folder / "events.jsonl").read_text().splitlines()]
    _lines(folder / "events.jsonl", events)
    with pytest.raises(UserError, match="do not name their samples"):
        read_run(folder)
    (folder / "samples.jsonl").write_text("")
    with pytest.raises(UserError, match="no step has ended"):
        read_run(folder)


def test_the_costs_of_one_run_predict_another_whose_parts_are_cut_otherwise() -> None:
    """With staleness, snapshots are scored apart from rewards."""
    made = recipe("grpo", rollout={"n_samples_per_prompt": 2}, train={"train_batch_size": 16}, pipeline={"max_staleness": 1})
    fitted = TaskCosts(TRUE.engine, {"judge+policy_snapshot+reference": Linear(0.3, per_token=3e-4)}, TRUE.trainers)
    parts = for_parts(fitted, made).scorers
    assert {frozenset(name.split("+")): cost.constant for name, cost in parts.items()} == {
        frozenset({"judge", "reference"}): pytest.approx(0.2),
        frozenset({"policy_snapshot"}): pytest.approx(0.1),
    }
