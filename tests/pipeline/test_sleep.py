"""Stages on one device group that leave its memory to one another: the same bits as without, and nobody works asleep."""

import json
from pathlib import Path
from typing import Any

import pytest

from conveyor.report.causes import idle_by_cause, idle_spells
from conveyor.report.events import read_events
from conveyor.report.progress import read_metrics
from conveyor.report.timeline import devices, step_idle, step_windows
from conveyor.run_folder import RunFolder
from tests.pipeline.in_process import Actor
from tests.pipeline.test_exactness import models, recipe, run, same_bits  # noqa: F401 (a fixture)

ALL = {"rollout": "all", "score": "all", "actor": "all"}
CASES: dict[str, dict[str, Any]] = {
    "everything on one group": {"method": "ppo", "roles": ALL, "algorithm": {"normalize": "streaming_exact", "entropy_coef": 0.01}},
    "snapshots": {"method": "ppo", "roles": ALL, "train": {"train_batch_size": 4}},
    "the reference on the trainer's group": {"method": "grpo", "roles": {"reference": "train", "score": "judges"}},
    "the reward model on the engines' group": {"method": "ppo", "roles": {"score": "rollout"}},
    "a refreshed reference, and checkpoints": {
        "method": "grpo",
        "roles": ALL,
        "algorithm": {"reference_refresh": 2},
        "checkpoint": {"every": 1},
    },
}
ASLEEP_TOO = {"prepare", "save_weights", "load_weights"}
"""Need no device, or wake for a moment."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sleep_changes_no_bit(case: str, models: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    settings = CASES[case]
    plain = run(recipe(models, tmp_path / "plain", settings, overlap=False))
    for overlap in (False, True):
        asleep = run(recipe(models, tmp_path / f"asleep {overlap}", settings, overlap=overlap, sleep=True), seed=1 + overlap)
        check_order(Actor.log, settings["roles"])
        assert same_bits(plain, asleep)
        tasks = [json.loads(line)["task"] for line in asleep.events.read_text().splitlines()]
        assert tasks.count("sleep") == tasks.count("wake") >= 2 * 3 - 1


def check_order(log: list[tuple[str, str]], roles: dict[str, str]) -> None:
    """Of the stages that share a group one is awake, and the others do nothing."""
    groups = {"rollout": {roles.get("rollout", "rollout")}, "train": {"train" if roles.get("actor") is None else roles["actor"]}}
    groups["score"] = {roles.get("score", "score"), roles.get("reference", roles.get("score", "score"))}
    shared = groups["rollout"] & groups["score"] | groups["rollout"] & groups["train"] | groups["score"] & groups["train"]
    # Where score workers are on two groups, those of one that nobody shares never sleep: only calls of the others can be told by name.
    stages = {stage for stage, own in groups.items() if own & shared and len(own) == 1}
    awake = {"train" if "train" in stages else "rollout"} & stages
    for stage, call in log:
        if stage not in stages:
            continue
        if call == "sleep":
            assert awake == {stage}, log
            awake.clear()
        elif call == "wake":
            assert not awake, f"{stage} wakes while {awake} are awake"
            awake = {stage}
        elif call not in {*ASLEEP_TOO, "renew", "ready"}:
            assert stage in awake, f"{stage} does {call} while {awake or 'nobody'} is awake"


@pytest.mark.slow
def test_staleness_1_on_one_group_trains_all(models: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    made = recipe(models, tmp_path / "run", CASES["snapshots"], max_staleness=1, order="completion", sleep=True)
    folder = run(made, seed=3)
    check_order(Actor.log, ALL)
    rows = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert sorted((row["group"], row["sample"]) for row in rows) == [(group, k) for group in range(12) for k in range(2)]
    assert max(row["staleness/max"] for row in read_metrics(folder.metrics)) <= 1


@pytest.mark.slow
def test_the_time_line_tells_what_moving_costs(models: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    folder: RunFolder = run(recipe(models, tmp_path / "run", {"method": "grpo", "roles": ALL}, sleep=True))
    events = read_events(folder.events)
    window = step_windows(events)[2]
    causes = idle_by_cause(idle_spells(events, window), window, devices(events))["all"]
    moves = [event for event in events if event.task in ("sleep", "wake") and event.step == 2]
    assert [(event.worker, event.task) for event in moves] == [
        ("rollout all 0", "sleep"), ("score all 0", "wake"), ("score all 0", "sleep"), ("train all 0", "wake"), ("train all 0", "sleep"),
        ("rollout all 0", "wake"),
    ]  # fmt: skip
    assert all(window[0] <= event.start and event.end <= window[1] for event in moves)
    seconds = sum(event.end - event.start for event in moves)
    assert 0.6 * seconds < causes["moving"] <= seconds  # micro-batches are made ready at the same time, which is no idleness
    assert sum(causes.values()) == pytest.approx((window[1] - window[0]) * step_idle(events, window)["all"])
