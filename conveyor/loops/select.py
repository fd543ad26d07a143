"""What is kept of the scored samples of one prompt: the best, those that are accepted, or pairs of a better and a worse one.

Samples are numbers 0 … n − 1 within their prompt's group, `scores[i]` is sample i's; a sample whose score is None is never chosen. A pair
is (better, worse). Ties go to the earlier sample, unless an order is drawn. Pure: what is drawn comes from the generator that is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

import numpy as np

Scores = Sequence[float | None]
Pair = tuple[int, int]


def best_of(scores: Scores, k: int = 1) -> list[int]:
    """The k samples of highest score, best first; all there are, if fewer."""
    scored = _scored(scores)
    return sorted(scored, key=lambda sample: -scored[sample])[:k]


def statistical_rejection(scores: Scores, beta: float, k: int, rng: np.random.Generator) -> list[int]:
    """Of samples drawn from π, k as if drawn from π(y)·exp(r(y)/β), in the order they were accepted; all there are, if fewer.

    Liu et al. 2023, RSO, arXiv 2309.06657, algorithm 1: each pass over what is left accepts a sample with probability exp((r − r_max)/β),
    r_max the largest score left when the pass began; what is accepted is not put back. The best one left is accepted in every pass, so
    there are k of them at most. Each goes through in an order of its own, so that nobody's place helps when the k-th ends it.
    β → 0: the best k, best first; β → ∞: any k.
    """
    assert beta > 0, beta
    left = _scored(scores)
    accepted: list[int] = []
    while left and len(accepted) < k:
        top = max(left.values())
        for sample in _shuffled(left, rng):
            if len(accepted) < k and rng.random() < math.exp((left[sample] - top) / beta):
                accepted.append(sample)
        left = {sample: score for sample, score in left.items() if sample not in accepted}
    return accepted


def first_round_pairs(accepted: Sequence[int], scores: Scores, rng: np.random.Generator) -> list[Pair]:
    """The accepted samples in pairs, drawn at random; of an odd number one is left (Liu et al. 2023, "first-round-ranking").

    Two of equal score make no pair.
    """
    pairs, _ = _matches(_shuffled(accepted, rng), scores)
    return pairs


def tournament_pairs(accepted: Sequence[int], scores: Scores, rng: np.random.Generator) -> list[Pair]:
    """Every match (winner, loser) of a knock-out tournament with a random draw (Liu et al. 2023, "tournament-ranking").

    n accepted samples play n − 1 matches. Of an odd number one goes on without a match, and has one in the next round. Two of equal
    score make no pair; the one drawn first goes on.
    """
    playing, pairs = _shuffled(accepted, rng), []
    while len(playing) > 1:
        of_round, playing = _matches(playing, scores)
        pairs += of_round
    return pairs


def best_worst_pair(scores: Scores) -> Pair | None:
    """None if there are no two different scores."""
    scored = _scored(scores)
    if not scored:
        return None
    best, worst = max(scored, key=lambda sample: scored[sample]), min(scored, key=lambda sample: scored[sample])
    return (best, worst) if scored[best] > scored[worst] else None


def all_pairs(scores: Scores, limit: int | None = None) -> list[Pair]:
    """Every pair of different scores, those furthest apart first; of these the first `limit`."""
    scored = _scored(scores)
    pairs = [(a, b) for a in scored for b in scored if scored[a] > scored[b]]
    return sorted(pairs, key=lambda pair: scored[pair[1]] - scored[pair[0]])[:limit]


def max_uncertainty_pair(members: Sequence[Scores]) -> Pair | None:
    """The pair whose difference of scores the members of an ensemble agree on least, as their mean score orders it.

    members[m][i] is what member m gives sample i. The disagreement is the standard deviation of members[m][a] − members[m][b] over m (after
    Xiong et al. 2023, arXiv 2312.11456, §4, where it stands for the width of a confidence interval); between pairs that are equal in it,
    the larger difference of means decides. A sample that a member has not scored is left out, and so are pairs of equal mean.
    None if no pair is left.
    """
    table = [np.array(column, dtype=float) for column in zip(*members, strict=True)]  # a sample's scores by all members, None → NaN
    scored = [sample for sample, column in enumerate(table) if not np.isnan(column).any()]
    found: tuple[float, float, Pair] | None = None
    for a, b in combinations(scored, 2):
        differences = table[a] - table[b]
        mean, spread = float(differences.mean()), float(differences.std())
        if mean and (found is None or (spread, abs(mean)) > found[:2]):
            found = spread, abs(mean), (a, b) if mean > 0 else (b, a)
    return found[2] if found else None


def multi_step(scores: Scores, etas_before: Sequence[float], eta: float, rng: np.random.Generator) -> list[int]:
    """The samples of a round that are accepted as ones of π_0(y)·exp(r(y)/η), in order: a step of Gibbs sampling from human feedback.

    Xiong et al. 2023, arXiv 2312.11456, "multi-step rejection sampling": 1/η rises from round to round, from 0, so that no step accepts
    few. The samples of round t come from the policy of the round before, which stands for π_0·exp(r/η_(t−1)); a sample is accepted with
    probability exp((r − r_max)·(1/η_t − 1/η_(t−1))), so the best one always is.

    etas_before: η of the rounds before, in order; empty in the first round. ValueError: an η that is not smaller than the one before it.
    """
    chain = (math.inf, *etas_before, eta)
    if min(chain) <= 0 or any(later >= earlier for earlier, later in pairwise(chain)):
        raise ValueError(f"etas must be positive and fall from round to round, so that 1/eta rises; these do not: {list(chain[1:])}")
    scored = _scored(scores)
    top, rise = max(scored.values(), default=0.0), 1 / eta - 1 / chain[-2]
    return [sample for sample, score in scored.items() if rng.random() < math.exp((score - top) * rise)]


def _scored(scores: Scores) -> dict[int, float]:
    assert all(score is None or math.isfinite(score) for score in scores), scores
    return {sample: score for sample, score in enumerate(scores) if score is not None}


def _shuffled(samples: Iterable[int], rng: np.random.Generator) -> list[int]:
    return [int(sample) for sample in rng.permutation(list(samples))]


def _matches(playing: Sequence[int], scores: Scores) -> tuple[list[Pair], list[int]]:
    """One round: the pairs, and who goes on: first the one without a match."""
    by_sample = _scored(scores)
    pairs, on = [], [*playing[len(playing) // 2 * 2 :]]
    for a, b in zip(playing[::2], playing[1::2], strict=False):
        winner, loser = (a, b) if by_sample[a] >= by_sample[b] else (b, a)
        on.append(winner)
        if by_sample[winner] > by_sample[loser]:
            pairs.append((winner, loser))
    return pairs, on
