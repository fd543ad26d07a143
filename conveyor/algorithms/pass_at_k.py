"""How often one of k samples is right, estimated from n of them."""

from __future__ import annotations

import math


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 − C(n − right, k) / C(n, k): the chance that k samples drawn from n without replacement hold a right one (Chen et al. 2021,
    eq. 1), which is unbiased for the chance that one of k fresh samples is right. Needs k ≤ n."""
    assert 0 <= right <= n and 1 <= k <= n
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
