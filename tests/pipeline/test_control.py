"""What a step learns from the steps before it, whenever its micro-batches come."""

import json

import numpy as np
import pytest

from conveyor.config import OnlineRecipe, UserError, parse_recipe
from conveyor.pipeline.control import StepControl
from conveyor.pipeline.ledger import Ledger
from conveyor.types import SampleId
from conveyor.workers.reports import MicroBatchKey, PrepareReport, SampleReport, Span, StepSettings


def recipe(staleness: int, method: str = "rloo", **algorithm: object) -> OnlineRecipe:
    made = parse_recipe({
        "method": method, "output_dir": "x", "model": {"path": "m"}, "data": {"path": "d"}, "train": {"rollout_batch_size": 2},
        "rewards": [{"name": "r", "model": "r", "normalize": "running"}, {"name": "plain", "model": "p"}],
        "rollout": {"n_samples_per_prompt": 2}, "pipeline": {"micro_batch_size": 1, "max_staleness": staleness},
        "algorithm": {"kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 40, **algorithm},
    })  # fmt: skip
    assert isinstance(made, OnlineRecipe)
    return made


def report(step: int, sample: int, reward: float | None, kl: float, tokens: int, baseline: bool = False) -> SampleReport:
    id = SampleId(2 * step + sample // 2, sample % 2)
    return SampleReport(id, {"r": reward, "plain": 1.0}, reward, reward, kl, tokens, tokens, False, 0, 0, baseline=baseline)


STEPS = [
    [report(0, k, reward, kl, 10) for k, (reward, kl) in enumerate([(1.0, 4.0), (3.0, 4.0), (None, 4.0), (2.0, 4.0)])],  # kl 0.4 a token
    [report(1, k, 5.0 * k, 1.05, 10) for k in range(4)],  # 0.105
    [report(2, k, 1.0, 0.0, 10) for k in range(4)],
]
FACTORS = [1 + 0.2 * 4 / 40, 1 + 0.05 * 4 / 40, 1 - 0.2 * 4 / 40]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_step_rests_on_the_steps_before_its_first_sample(staleness: int) -> None:
    control = StepControl(recipe(staleness))
    for step in range(staleness + 1):
        assert control.settings(step) == StepSettings(0.5) and not control.rests_on(step)
    assert list(control.rests_on(staleness + 2)) == [0, 1]
    rewards, coef = [], 0.5
    for step, samples in enumerate(STEPS):
        control.learn(step, samples)
        rewards += [sample.rewards["r"] for sample in samples if sample.rewards["r"] is not None]
        coef *= FACTORS[step]
        found = control.settings(step + staleness + 1)
        assert found.kl_coef == pytest.approx(coef, rel=1e-12)
        assert found.scales.keys() == {"r"}
        assert (found.scales["r"].mean, found.scales["r"].std) == pytest.approx((np.mean(rewards), np.std(rewards, ddof=1)))


def test_greedy_baselines_teach_nothing() -> None:
    made = recipe(0, "remax")
    one, other = StepControl(made), StepControl(made)
    one.learn(0, STEPS[0])
    other.learn(0, [*STEPS[0], report(0, 1, 100.0, 50.0, 3, baseline=True)])
    assert one.settings(1) == other.settings(1)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_run_has_the_settings_of_one_that_never_stopped(staleness: int) -> None:
    made = recipe(staleness)
    whole = StepControl(made)
    for step, samples in enumerate(STEPS):
        state = json.loads(json.dumps(whole.state()))
        resumed = StepControl(made, step, state)
        for later in range(step, len(STEPS)):
            resumed.learn(later, STEPS[later])
        whole.learn(step, samples)
        again = StepControl(made, step + 1, json.loads(json.dumps(whole.state())))
        assert [again.settings(step + 1 + k) for k in range(staleness + 1)] == [whole.settings(step + 1 + k) for k in range(staleness + 1)]
        if step == 0:
            first = resumed
    assert first.settings(3 + staleness) == whole.settings(3 + staleness)


def test_without_a_controller_the_coefficient_stays() -> None:
    control = StepControl(recipe(0, kl_target=None))
    control.learn(0, STEPS[0])
    assert control.settings(1).kl_coef == 0.5


@pytest.mark.parametrize("asked", ["early", "late"])
def test_the_ledger_learns_once_of_whole_steps_whenever_it_is_asked(asked: str) -> None:
    """With staleness 1 step 2 may be prepared before step 1 is trained, or after."""
    ledger = Ledger(recipe(1))
    for step, samples in enumerate(STEPS):
        if asked == "early" or step == 2:
            assert ledger.settings(step).kl_coef == pytest.approx(0.5 * (FACTORS[0] if step == 2 else 1), rel=1e-12)
        for number, sample in enumerate(samples):
            ledger.add_reports(0, [PrepareReport(MicroBatchKey(step, 0, number), (sample,), Span(0, 0))])
        if step:
            ledger.finish_step(0, step - 1)
            assert ledger.state(step) == ledger.state(step)
    assert ledger.settings(3).kl_coef == pytest.approx(0.5 * FACTORS[0] * FACTORS[1], rel=1e-12)


def test_a_first_success_among_equal_rewards_is_not_lost() -> None:
    """A reward that was 0 for every sample so far has no scale, so the first 1 stays a 1."""
    control = StepControl(recipe(0))
    control.learn(0, [report(0, k, 0.0, 0.0, 10) for k in range(4)])
    assert control.settings(1).scales == {}
    control.learn(1, [report(1, k, float(k == 0), 0.0, 10) for k in range(4)])
    assert control.settings(2).scales["r"].mean == pytest.approx(1 / 8)


SOUND = {"settings": [{"kl_coef": 0.5, "scales": {}}], "running": {"r": {"count": 0, "mean": 0.0, "squares": 0.0}}}


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {}}, {"settings": [1]}, {"settings": []}, {"settings": [{"kl_coef": 0.5}]}, {"settings": None},
        {"settings": [{"kl_coef": "x", "scales": {}}]}, {"settings": [{"kl_coef": float("nan"), "scales": {}}]},
        {"settings": [{"kl_coef": 0.5, "scales": {"r": {"mean": 1.0}}}]}, {"running": {}}, {"running": {"r": {"count": 1}}},
        {"running": None},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_in_one_line(changes: dict) -> None:
    StepControl(recipe(0), 3, SOUND)
    with pytest.raises(UserError, match=r"^checkpoint\.resume: control\.json does not say"):
        StepControl(recipe(0), 3, SOUND | changes)
