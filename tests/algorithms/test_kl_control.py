"""The adaptive coefficient of the KL: known right values (hand-computed)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.algorithms.kl_control import adapted


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [  # target 2, 1000 samples of a horizon of 10 000: at most ±2 % a step
        (2.0, 0.05),
        (2.2, 0.05 * (1 + 0.1 * 0.1)),
        (1.8, 0.05 * (1 - 0.1 * 0.1)),
        (50.0, 0.05 * (1 + 0.2 * 0.1)),
        (0.0, 0.05 * (1 - 0.2 * 0.1)),
        (-3.0, 0.05 * (1 - 0.2 * 0.1)),
    ],
)
def test_the_controller_by_hand(kl, wanted):
    assert adapted(0.05, kl, target=2.0, samples=1000, horizon=10_000) == pytest.approx(wanted, rel=1e-12)


@given(
    kl_coef=st.floats(1e-300, 100), kl=st.floats(-1e3, 1e3), target=st.floats(1e-3, 1e3), samples=st.integers(0, 10**6),
    horizon=st.floats(1, 1e6),
)  # fmt: skip
def test_the_coefficient_stays_above_zero_and_moves_towards_the_target(kl_coef, kl, target, samples, horizon):
    found = adapted(kl_coef, kl, target, samples, horizon)
    assert found > 0
    assert (found >= kl_coef) if kl >= target else (found <= kl_coef)


def test_a_kl_that_falls_as_the_coefficient_rises_is_brought_to_the_target():
    kl_coef = 0.01
    for _ in range(2000):
        kl_coef = adapted(kl_coef, kl=0.5 / (0.1 + kl_coef), target=1.0, samples=256, horizon=10_000)
    assert kl_coef == pytest.approx(0.4, rel=1e-3)


def test_a_step_of_many_horizons_of_samples_does_not_end_the_kl():
    """1 − 0.2 · 10 would be below 0."""
    assert adapted(0.05, kl=0.0, target=1.0, samples=1000, horizon=100) == pytest.approx(0.005)
    assert adapted(0.05, kl=9.0, target=1.0, samples=1000, horizon=100) == pytest.approx(0.15)


def test_it_recovers_from_the_smallest_number():
    kl_coef = 1e-300
    for _ in range(1000):
        kl_coef = adapted(kl_coef, kl=0.0, target=1.0, samples=10**6, horizon=1)
    assert adapted(kl_coef, kl=5.0, target=1.0, samples=10_000, horizon=10_000) > kl_coef
