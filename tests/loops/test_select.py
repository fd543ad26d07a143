"""What is kept of a prompt's samples: exact choices, closed-form acceptance probabilities, and what holds of every draw."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.loops.select import (
    all_pairs,
    best_of,
    best_worst_pair,
    first_round_pairs,
    max_uncertainty_pair,
    multi_step,
    statistical_rejection,
    tournament_pairs,
)

thousandths = st.integers(-(10**9), 10**9).map(lambda number: number / 1000)  # apart by more than rounding
some_scores = st.lists(st.none() | st.integers(-3, 3).map(float) | thousandths, max_size=9)
seeds = st.integers(0, 2**32)
DRAWS = 4000


def rng(seed=0):
    return np.random.default_rng(seed)


def near(share, probability, draws=DRAWS):
    """Within 4 standard deviations of the number of successes."""
    return abs(share - probability) <= 4 * math.sqrt(probability * (1 - probability) / draws)


def test_best_of():
    scores = [0.5, None, 2.0, 0.5, -1.0, 2.0]
    assert best_of(scores) == [2]
    assert best_of(scores, 4) == [2, 5, 0, 3]
    assert best_of(scores, 9) == [2, 5, 0, 3, 4]
    assert best_of([None, None], 2) == [] == best_of([], 2)


@given(some_scores, st.floats(1e-9, 1e9), st.integers(0, 10), seeds)
def test_statistical_rejection_accepts_k_once_each(scores, beta, k, seed):
    accepted = statistical_rejection(scores, beta, k, rng(seed))
    assert len(accepted) == len(set(accepted)) == min(k, sum(score is not None for score in scores))
    assert all(scores[sample] is not None for sample in accepted)


@given(some_scores, st.integers(1, 10), seeds)
def test_a_cold_statistical_rejection_takes_the_best(scores, k, seed):
    accepted = statistical_rejection(scores, 1e-300, k, rng(seed))
    assert [scores[sample] for sample in accepted] == [scores[sample] for sample in best_of(scores, k)]


def test_huge_differences_end_at_once():
    assert statistical_rejection([0.0, 1e6, -1e6, 1e308, -1e308], 1e-3, 5, rng()) == [3, 1, 0, 2, 4]


def test_a_hot_statistical_rejection_takes_any():
    generator = rng(1)
    found = Counter(statistical_rejection([0.0, 1.0, 2.0, 3.0], 1e12, 2, generator)[0] for _ in range(DRAWS))
    assert all(near(found[sample] / DRAWS, 0.25) for sample in range(4))


def first_pass(scores, beta):
    """P(the first one accepted is i), k = 1: over all orders of a pass, i is accepted and none before it."""
    accept = [math.exp((score - max(scores)) / beta) for score in scores]
    orders = list(permutations(range(len(scores))))
    found = [0.0] * len(scores)
    for order in orders:
        none_before = 1.0
        for sample in order:
            found[sample] += none_before * accept[sample] / len(orders)
            none_before *= 1 - accept[sample]
    return found


def test_statistical_rejection_has_the_papers_probabilities():
    """Rewards 0, 1, 3 and β = 2: exp((r − 3)/2) in the first pass, exp((r − 1)/2) in the second, if only the best one left in the first."""
    scores, beta, generator = [0.0, 1.0, 3.0], 2.0, rng(2)
    wanted = first_pass(scores, beta)
    assert sum(wanted) == pytest.approx(1)  # the best one ends each pass
    first = Counter(statistical_rejection(scores, beta, 1, generator)[0] for _ in range(DRAWS))
    assert all(near(first[sample] / DRAWS, wanted[sample]) for sample in range(3))

    # (2, 1, 0), for in the first pass 2 is accepted, and
    # * no other: then, with r_max = 1, unless 0 comes before 1 and is accepted with exp(−½)
    # * 1 too, after 2, but not 0
    # * all three, in this order
    low, middle = math.exp(-3 / 2), math.exp(-2 / 2)
    order = Counter(tuple(statistical_rejection(scores, beta, 3, generator)) for _ in range(DRAWS))
    again = math.exp(-1 / 2)
    wanted_last = (1 - low) * (1 - middle) * (1 - again / 2) + (1 - low) * middle / 2 + low * middle / 6
    assert near(order[2, 1, 0] / DRAWS, wanted_last)


@given(some_scores, seeds)
def test_a_tournament_has_one_winner(scores, seed):
    accepted = [sample for sample, score in enumerate(scores) if score is not None]
    pairs = tournament_pairs(accepted, scores, rng(seed))
    assert all(scores[winner] > scores[loser] for winner, loser in pairs)
    losers = [loser for _, loser in pairs]
    assert len(losers) == len(set(losers))  # who has lost is out
    if len({scores[sample] for sample in accepted}) == len(accepted) > 0:
        assert len(pairs) == len(accepted) - 1
        assert set(accepted) - set(losers) == set(best_of(scores))


@given(some_scores, seeds)
def test_the_first_round_has_everyone_once(scores, seed):
    accepted = [sample for sample, score in enumerate(scores) if score is not None]
    pairs = first_round_pairs(accepted, scores, rng(seed))
    players = [sample for pair in pairs for sample in pair]
    assert len(players) == len(set(players)) and set(players) <= set(accepted)
    assert all(scores[winner] > scores[loser] for winner, loser in pairs)
    if len({scores[sample] for sample in accepted}) == len(accepted):
        assert len(pairs) == len(accepted) // 2
    assert pairs == tournament_pairs(accepted, scores, rng(seed))[: len(pairs)]


def test_a_tournament_by_hand():
    """Only the accepted play. Of four, the best one wins both its matches and the draw decides who loses when."""
    scores = [9.0, 1.0, 4.0, 2.0, 3.0]
    found = {tuple(tournament_pairs([1, 2, 3, 4], scores, rng(seed))) for seed in range(200)}
    finals = Counter(pairs[-1] for pairs in found)
    assert set(finals) == {(2, 3), (2, 4)} and all(len(pairs) == 3 for pairs in found)  # sample 1 wins no match
    assert tournament_pairs([1, 2], scores, rng()) == [(2, 1)]
    assert tournament_pairs([2], scores, rng()) == [] == tournament_pairs([], scores, rng())
    assert first_round_pairs([2, 3, 4], [1.0] * 5, rng()) == []


def test_of_three_each_goes_on_without_a_match_as_often():
    generator = rng(3)
    idle = Counter(({0, 1, 2} - set(first_round_pairs([0, 1, 2], [0.0, 1.0, 2.0], generator)[0])).pop() for _ in range(DRAWS))
    assert all(near(idle[sample] / DRAWS, 1 / 3) for sample in range(3))


def test_nobody_goes_on_twice_without_a_match():
    """Of five, one is idle in the first round; in the second it plays, and another one of the three is idle."""
    scores = [0.0, 1.0, 2.0, 3.0, 4.0]
    for seed in range(100):
        pairs = tournament_pairs(range(5), scores, rng(seed))
        first, second = pairs[:2], pairs[2]
        (idle,) = set(range(5)) - {sample for pair in first for sample in pair}
        assert idle in second


def test_best_worst_pair():
    assert best_worst_pair([0.5, None, 2.0, -1.0, 2.0, -1.0]) == (2, 3)
    assert best_worst_pair([1.0, 1.0, None]) is None
    assert best_worst_pair([1.0]) is None is best_worst_pair([]) and best_worst_pair([None]) is None


def test_all_pairs():
    scores = [1.0, None, 3.0, 0.0, 1.0]
    assert all_pairs(scores) == [(2, 3), (2, 0), (2, 4), (0, 3), (4, 3)]  # differences 3, 2, 2, 1, 1
    assert all_pairs(scores, limit=2) == [(2, 3), (2, 0)]
    assert all_pairs([1.0, 1.0]) == [] == all_pairs([None, 2.0])


@given(some_scores)
def test_the_first_of_all_pairs_is_the_best_and_worst(scores):
    assert all_pairs(scores, limit=1) == [pair for pair in [best_worst_pair(scores)] if pair]


def test_max_uncertainty_pair():
    """Differences of two members: (0, 1): 1 and 1; (0, 2): 4 and −1; (1, 2): 3 and −2. Means 2.5, 1.5, 1."""
    assert max_uncertainty_pair([[4.0, 3.0, 0.0], [1.0, 0.0, 2.0]]) == (0, 2)  # as uncertain as (1, 2), and further apart
    assert max_uncertainty_pair([[0.0, 3.0, 4.0], [1.0, 0.0, 2.0]]) == (1, 0)  # differences of (0, 1): −3 and 1; means ½ and 1.5
    assert max_uncertainty_pair([[4.0, None, 0.0], [1.0, 9.0, 2.0]]) == (0, 2)
    assert max_uncertainty_pair([[1.0, 1.0], [2.0, 2.0]]) is None
    assert max_uncertainty_pair([[1.0], [2.0]]) is None is max_uncertainty_pair([[], []])


def test_multi_step_by_hand():
    """1/η from ½ to 1: acceptance exp((r − 3)/2)."""
    generator, scores = rng(4), [0.0, None, 3.0, 1.0]
    found = Counter(sample for _ in range(DRAWS) for sample in multi_step(scores, [4.0, 2.0], 1.0, generator))
    assert found[2] == DRAWS and found[1] == 0
    assert near(found[0] / DRAWS, math.exp(-1.5)) and near(found[3] / DRAWS, math.exp(-1.0))


def test_the_first_step_starts_from_no_tilt():
    generator = rng(5)
    found = Counter(sample for _ in range(DRAWS) for sample in multi_step([0.0, 1.0], [], 2.0, generator))
    assert found[1] == DRAWS and near(found[0] / DRAWS, math.exp(-0.5))


def test_steps_multiply_to_the_whole_tilt():
    """exp(r/η_1) · exp(r·(1/η_2 − 1/η_1)) = exp(r/η_2): accepted in both rounds as if in one."""
    generator, scores, kept = rng(6), [0.0, 2.0], 0
    for _ in range(DRAWS):
        kept += 0 in multi_step(scores, [], 4.0, generator) and 0 in multi_step(scores, [4.0], 1.0, generator)
    assert near(kept / DRAWS, math.exp(-2.0))


@given(some_scores, st.lists(st.floats(0.01, 100), min_size=1, max_size=4, unique=True), seeds)
def test_multi_step_accepts_the_best_always(scores, etas, seed):
    *before, eta = sorted(etas, reverse=True)
    accepted = multi_step(scores, before, eta, rng(seed))
    assert accepted == sorted(set(accepted)) and set(best_of(scores)) <= set(accepted)
    assert all(scores[sample] is not None for sample in accepted)


@pytest.mark.parametrize(("before", "eta"), [([1.0], 1.0), ([1.0], 2.0), ([1.0, 2.0], 0.5), ([], 0.0), ([1.0], -1.0)])
def test_etas_must_fall(before, eta):
    with pytest.raises(ValueError, match="fall from round to round"):
        multi_step([1.0, 2.0], before, eta, rng())


def test_the_same_seed_draws_the_same():
    scores = [0.1 * sample for sample in range(8)]
    for draw in (
        lambda generator: statistical_rejection(scores, 0.5, 4, generator),
        lambda generator: tournament_pairs(range(8), scores, generator),
        lambda generator: multi_step(scores, [], 0.5, generator),
    ):
        assert draw(rng(7)) == draw(rng(7))
