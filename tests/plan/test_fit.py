"""Costs come back from a run that was simulated with them."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
from conveyor.types import SampleId
from tests.plan.recipes import raw, recipe

TRUE = TaskCosts(
    Iterations(constant=0.02, per_sample=0.0015),
    {"judge+reference": Linear(0.03, per_token=2e-4)},
    {"actor+critic": TrainerCosts(Linear(0.05, per_token=4e-4), Linear(0.002, per_token=1e-6), update=0.2, publish=0.1, finish=0)},
    engine_install=0.15,
    latency=0.004,
)
ROLES = {"rollout": 2, "score": 1, "train": 2}


def write_run(
    folder: Path,
    costs: TaskCosts = TRUE,
    lengths: str = "lognormal:mean=60,sigma=0.7",
    steps: int = 4,
    equal: float = 0.0,
    sections: dict[str, Any] | None = None,
    **pipeline,
) -> Path:
    """The folder of a run that took exactly the times of `costs`."""
    keys = {"devices": ROLES, "roles": {}, "pipeline": pipeline, **(sections or {})}
    keys["rollout"] = {"max_concurrent_requests": 8, **keys.get("rollout", {})}
    made, parsed = raw(**keys), recipe(**keys)
    plan = run_plan(parsed, [parsed.train.rollout_batch_size] * steps, ROLES)
    scorers = {"+".join(part.roles): costs.scorers["judge+reference"] for part in plan.parts}
    workload = Workload.draw(lengths, parsed.train.rollout_batch_size * steps, plan.samples_per_group, prompt=20, equal=equal)
    run = simulate(plan, replace(costs, scorers=scorers), workload, ROLES)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    _lines(folder / "events.jsonl", [asdict(event) for event in run.events])
    trained = sorted((event.step, *sample) for event in run.events if event.task == "prepare" for sample in event.samples)
    sizes = [(step, group, sample, workload.at(group, sample)) for step, group, sample in trained]
    tokens = {step: sum(size.response for of, _, _, size in sizes if of == step) for step in range(1, steps + 1)}
    _lines(folder / "metrics.jsonl", [{"step": step, "tokens": of_step} for step, of_step in tokens.items()])
    rows = [
        {"step": step, "group": group, "sample": sample, "prompt": "p" * size.prompt, "response": "r" * (size.response - 1)}
        for step, group, sample, size in sizes
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


JUDGED = {"rewards": [{"name": "verifier", "function": "verify.py:check"}]}
"""Sections of a recipe without reward models."""


def test_the_times_of_judging_are_those_measured(tmp_path: Path) -> None:
    times = (0.2, 0.9, 2.5)
    run = read_run(write_run(tmp_path / "run", replace(TRUE, judging=times), sections=JUDGED))
    assert set(run.devices) == set(ROLES), "functions and urls are no device"
    found = fit(run)
    assert sorted({round(seconds, 9) for seconds in found.judging}) == list(times)
    assert len(found.judging) == 3 * 32, "the first step is left out"
    drawn = [found.judge(SampleId(group, 0)) for group in range(3000)]
    assert np.mean(drawn) == pytest.approx(np.mean(found.judging), rel=0.05)
    result = validate(run)
    assert abs(result.step_error) < 0.05
    for group, share in result.measured.idle.items():
        assert result.predicted.idle[group] == pytest.approx(share, abs=0.03)


def test_a_profile_without_judging_needs_to_be_told_how_long_it_takes(tmp_path: Path) -> None:
    made = recipe(devices=ROLES, roles={}, **JUDGED)
    run = read_run(write_run(tmp_path / "run"))
    with pytest.raises(UserError, match=r"tells nothing of rewards that are functions or urls; say how long they take \(--judge-seconds\)"):
        Profile.of(run).costs(made)
    assert Profile.of(run, judge_seconds=2.0).costs(made).judge(SampleId(3, 0)) == 2.0


def test_groups_that_were_dropped_are_part_of_the_workload(tmp_path: Path) -> None:
    """They have no rows; how long their responses were is told by the time they took."""
    sections = {
        **JUDGED, "method": "dapo", "rollout": {"n_samples_per_prompt": 2, "dynamic_sampling": True}, "train": {"rollout_batch_size": 16},
        "algorithm": {"kl_coef": 0.1},
    }  # fmt: skip
    trainers = {"actor": TRUE.trainers["actor+critic"]}
    run = read_run(write_run(tmp_path / "run", replace(TRUE, trainers=trainers), equal=0.3, sections=sections))
    trained = {group for event in run.events if event.task == "prepare" for group, _ in event.samples}
    sampled = {group for event in run.events if event.task == "rollout" for group, _ in event.samples}
    assert len(trained) == 4 * 16 < len(sampled)
    assert {group for group in sampled if run.workload.equal(group)} == sampled - trained
    assert run.workload.equal_share == pytest.approx(0.3, abs=0.1)
    result = validate(run)
    assert abs(result.step_error) < 0.1
