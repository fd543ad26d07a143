"""Balance losses of experts: known values, transformers' own function, and what they must not depend on."""

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from conveyor.algorithms.expert_balance import (
    RouterSums,
    Statistic,
    pooled_balance,
    router_sums,
    sample_weights,
    sequence_balance,
    weighted_balance,
)
from conveyor.algorithms.metrics import Load, merge


def sums_of(logits: Tensor, k: int, owners: Tensor, samples: int) -> RouterSums:
    """Of a router that takes the K largest."""
    return router_sums(logits.softmax(-1), logits.topk(k).indices, owners, samples)


def drawn(seed: int, tokens: int, layers: int = 3, experts: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(tokens, experts, generator=generator) for _ in range(layers)]


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (8, 2)])
def test_equal_probabilities_give_1_by_sequence_and_k_pooled(experts: int, k: int) -> None:
    """Each of E tokens goes to k experts in turn, all probabilities are 1/E."""
    chosen = torch.stack([(torch.arange(k) + token) % experts for token in range(experts)])
    sums = router_sums(torch.full((experts, experts), 1 / experts), chosen, torch.zeros(experts, dtype=torch.int64), 1)
    lengths = torch.tensor([experts])
    assert sequence_balance([sums, sums], lengths).tolist() == pytest.approx([1.0])
    assert float(pooled_balance([sums, sums], lengths)) == pytest.approx(k)


def test_an_expert_that_takes_everything_gives_their_number() -> None:
    probabilities = torch.eye(5)[torch.zeros(7, dtype=torch.int64)]
    sums = router_sums(probabilities, torch.zeros(7, 1, dtype=torch.int64), torch.zeros(7, dtype=torch.int64), 1)
    assert sequence_balance([sums], torch.tensor([7])).tolist() == pytest.approx([5.0])
    assert float(pooled_balance([sums], torch.tensor([7]))) == pytest.approx(5.0)


def test_by_hand() -> None:
    """Two tokens of two experts, both to the first: f = (2, 0), P = (0.75, 0.25)."""
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    sums = router_sums(probabilities, torch.tensor([[0], [0]]), torch.tensor([0, 0]), 1)
    assert sums.chosen.tolist() == [[2, 0]]
    assert sequence_balance([sums], torch.tensor([2])).tolist() == pytest.approx([1.5])
    other = router_sums(probabilities, torch.tensor([[0], [1]]), torch.tensor([0, 0]), 1)  # f = (1, 1)
    assert sequence_balance([sums, other], torch.tensor([2])).tolist() == pytest.approx([1.25]), "the mean over layers"


@pytest.mark.parametrize("padded", [False, True])
def test_pooled_equals_transformers(padded: bool) -> None:
    tokens, k = 12, 2
    layers = drawn(1, tokens)
    mask = torch.ones(2, tokens // 2)
    if padded:
        mask[1, 3:] = 0
    owners = torch.where(mask.bool(), torch.arange(2)[:, None], -1).flatten()
    wanted = load_balancing_loss_func(tuple(layers), 6, k, mask if padded else None)
    found = pooled_balance([sums_of(logits, k, owners, 2) for logits in layers], mask.sum(1).long())
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("statistic", ["sequence", "micro_batch"])
def test_padding_counts_nowhere(statistic: Statistic) -> None:
    lengths, weights = torch.tensor([3, 2]), torch.tensor([2.0, 1.0])
    plain, padded = [], []
    for logits in drawn(2, 5):
        plain.append(sums_of(logits, 2, torch.tensor([0, 0, 0, 1, 1]), 2))
        rows = torch.cat([logits[:3], 99 * torch.eye(6)[:1], logits[3:], -99 * torch.eye(6)[:2]])
        padded.append(sums_of(rows, 2, torch.tensor([0, 0, 0, -1, 1, 1, -1, -1]), 2))
    assert float(weighted_balance(padded, lengths, weights, statistic)) == pytest.approx(
        float(weighted_balance(plain, lengths, weights, statistic)), rel=1e-6
    )


def test_by_sequence_the_cut_into_micro_batches_changes_nothing_and_pooled_it_does() -> None:
    lengths, weights = torch.tensor([4, 1, 5]), torch.tensor([3.0, 1.0, 5.0])
    layers = drawn(3, 10)

    def total(statistic: Statistic, cut: list[list[int]]) -> float:
        found = 0.0
        starts = (lengths.cumsum(0) - lengths).tolist()
        for part in cut:
            rows = torch.cat([torch.arange(starts[i], starts[i] + int(lengths[i])) for i in part])
            owners = torch.arange(len(part)).repeat_interleave(lengths[part])
            sums = [sums_of(logits[rows], 2, owners, len(part)) for logits in layers]
            found += float(weighted_balance(sums, lengths[part], weights[part], statistic))
        return found

    assert total("sequence", [[0, 1, 2]]) == pytest.approx(total("sequence", [[2, 0], [1]]), rel=1e-6)
    assert total("micro_batch", [[0, 1, 2]]) != pytest.approx(total("micro_batch", [[2, 0], [1]]), rel=1e-3)


def test_its_gradient_takes_tokens_from_the_expert_that_has_too_many() -> None:
    logits = torch.zeros(6, 3, requires_grad=True)
    with torch.no_grad():
        logits[:, 0] = 1.0
    sums = router_sums(logits.softmax(-1), logits.topk(1).indices, torch.zeros(6, dtype=torch.int64), 1)
    sequence_balance([sums], torch.tensor([6])).sum().backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


def test_weights_are_the_samples_parts_of_the_denominator() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    assert sample_weights(mask, "token_mean", 9).tolist() == [2, 0, 1]
    assert sample_weights(mask, "sequence_mean", 9).tolist() == [1, 0, 1]
    assert sample_weights(mask, "constant", 9).tolist() == [9, 9, 9]
    assert sample_weights(mask, "token_mean", 9, signs=torch.tensor([1, 0, -1])).tolist() == [0.5, 0, 0.5]


def test_loads_are_added_before_their_extremes_are_taken() -> None:
    """Two micro-batches that each favour one of two experts are balanced together; of two layers the worse one counts."""
    one, other = Load(((3, 1), (2, 2)), "max"), Load(((1, 3), (1, 3)), "max")
    assert (one.value, other.value) == (1.5, 1.5)
    assert (one + other).value == 1.25
    low = merge([{"low": Load(((3, 1), (2, 2)), "min")}, {"low": Load(((1, 3), (1, 3)), "min")}])["low"]
    assert low.value == 0.75
    assert Load(((0, 0),), "max").value == 0
