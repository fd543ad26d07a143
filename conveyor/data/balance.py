"""Micro-batches by tokens: lengths shared out among ranks so that each has about as much to compute. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Item numbers in `parts` lists whose sums are close to each other, largest sum first.

    The largest differencing method (Karmarkar and Karp 1982): the two partial solutions that are least even are joined, the heaviest
    list of one with the lightest of the other, until one is left. O(n · parts · log n); depends on `sizes` alone.
    """
    if parts == 1:
        return [list(range(len(sizes)))]
    nothing: list[tuple[int, list[int]]] = [(0, [])] * (parts - 1)
    # (−spread, tie-break, [(sum, items)] from the heaviest to the lightest)
    heap = [(-size, item, [(size, [item]), *nothing]) for item, size in enumerate(sizes)] or [(0, 0, [(0, []), *nothing])]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, other_number, other = heapq.heappop(heap)
        joined = [(a + b, [*items, *more]) for (a, items), (b, more) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(number, other_number), joined))
    return [sorted(items) for _, items in heap[0][2]]


def micro_batches(lengths: Sequence[int], ranks: int, budget: int | None = None) -> list[list[list[int]]]:
    """Micro-batch → rank → item numbers: as few micro-batches as keep every rank's share within a budget of tokens.

    Ranks have the same number of micro-batches, and of each about as many tokens. An item longer than the budget stands alone. Where
    there are fewer items than shares, some are empty.

    Args:
        lengths: tokens of each item.
        budget: most tokens of one rank in one micro-batch; None: one micro-batch, however large.
    """
    most = max(lengths, default=0) if budget is None else max(budget, max(lengths, default=0))
    count = 1 if budget is None else max(1, -(-sum(lengths) // (most * ranks)))
    while True:
        shares = karmarkar_karp(lengths, count * ranks)
        if budget is None or sum(lengths[item] for item in shares[0]) <= most or count >= len(lengths):
            return [shares[first : first + ranks] for first in range(0, len(shares), ranks)]
        count += 1
