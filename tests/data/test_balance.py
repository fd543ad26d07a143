from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.data.balance import karmarkar_karp, micro_batches

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def test_karmarkar_karp_by_hand():
    """Karmarkar and Karp's own example: 8, 7, 6, 5, 4 differ by 2 after differencing (the best is 0)."""
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in karmarkar_karp([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]


@given(SIZES, st.integers(1, 8))
def test_every_item_is_in_one_part(sizes, parts):
    found = karmarkar_karp(sizes, parts)
    assert len(found) == parts and sorted(item for part in found for item in part) == list(range(len(sizes)))
    sums = [sum(sizes[item] for item in part) for part in found]
    assert sums == sorted(sums, reverse=True) and all(part == sorted(part) for part in found)
    assert max(sums) - min(sums) <= max(sizes)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_near_the_best_of_all_partitions(sizes, parts):
    """At most 4/3 of the best largest sum, as largest-first scheduling guarantees too (Graham 1969)."""
    best = min(max(sum(s for s, p in zip(sizes, places, strict=True) if p == part) for part in range(parts))
               for places in product(range(parts), repeat=len(sizes)))  # fmt: skip
    assert max(sum(sizes[item] for item in part) for part in karmarkar_karp(sizes, parts)) <= 4 / 3 * best


def test_lognormal_lengths_are_shared_out_evenly():
    lengths = np.random.default_rng(0).lognormal(6, 1, 256).astype(int).tolist()
    sums = [sum(lengths[item] for item in part) for part in karmarkar_karp(lengths, 8)]
    strided = [sum(lengths[rank::8]) for rank in range(8)]
    assert max(sums) / min(sums) < 1.001 and max(strided) / min(strided) > 1.2


@given(SIZES, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 1500)))
def test_micro_batches_hold_every_item_once_within_the_budget(lengths, ranks, budget):
    cut = micro_batches(lengths, ranks, budget)
    assert all(len(shares) == ranks for shares in cut)
    assert sorted(item for shares in cut for share in shares for item in share) == list(range(len(lengths)))
    for share in (share for shares in cut for share in shares):
        assert budget is None or len(share) <= 1 or sum(lengths[item] for item in share) <= max(budget, max(lengths))
    if budget is None:
        assert len(cut) == 1


def test_as_few_micro_batches_as_the_budget_allows():
    assert len(micro_batches([10] * 8, 2, 20)) == 2
    assert len(micro_batches([10] * 8, 2, 40)) == 1
    assert len(micro_batches([10, 90, 10], 1, 50)) == 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_to_share_out(ranks):
    assert micro_batches([], ranks, 10) == [[[] for _ in range(ranks)]]
