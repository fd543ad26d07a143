"""A coefficient of the KL that is moved until the KL is what was asked for."""

from __future__ import annotations

import sys

LARGEST_ERROR = 0.2
SMALLEST_FACTOR = 0.1
"""More than 4.5 horizons of samples in one step would otherwise bring the coefficient to 0 or below, where it would stay."""


def adapted(kl_coef: float, kl: float, target: float, samples: int, horizon: float) -> float:
    """The coefficient after a step of `samples` samples with mean KL `kl`: kl_coef · (1 + e · samples/horizon).

    e = clip(kl/target − 1, −0.2, 0.2): the proportional controller of Ziegler et al. 2019, §2.2. `kl` and `target` are in one
    unit. Always above 0.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    factor = max(1 + error * samples / horizon, SMALLEST_FACTOR)
    return max(kl_coef * factor, sys.float_info.min)
