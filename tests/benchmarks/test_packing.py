"""What the benchmark of packing trains."""

import numpy as np

from benchmarks import packing


def test_lengths_are_lognormal_and_follow_from_the_seed() -> None:
    lengths = packing.lengths()
    assert lengths == packing.lengths() and len(lengths) == packing.STEP
    assert min(lengths) >= packing.SHORTEST and max(lengths) <= packing.LONGEST
    assert 0.6 < np.log(lengths).std() < 0.95
    padded = sum(packing.MICRO_BATCH * max(lengths[first : first + packing.MICRO_BATCH]) for first in range(0, 64, packing.MICRO_BATCH))
    assert padded > 1.8 * sum(lengths), "padding is what the benchmark is about"
