import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from conveyor.data.packing import collate, first_fit_decreasing, pack
from conveyor.data.samples import Sample
from tests.tiny import tiny_config


def sample(length, seed=0):
    rng = np.random.default_rng([seed, length])
    mask = rng.random(length) < 0.6
    mask[0], mask[-1] = False, True
    return Sample(rng.integers(5, 264, length).astype(np.int32), mask, f"row {seed}")


def test_first_fit_decreasing_by_hand():
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 3, 2, 5]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_bins_hold_every_item_once_and_first_fit(lengths):
    bins = first_fit_decreasing(lengths, 20)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    room: list[int] = []
    where: dict[int, int] = {}
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, left in enumerate(room) if left >= lengths[item]), len(room))
        room[place:] = room[place:] or [20]
        room[place] -= lengths[item]
        where[item] = place
    assert {item: b for b, items in enumerate(bins) for item in items} == where


def test_an_item_larger_than_a_bin():
    with pytest.raises(ValueError, match="an item of 21 does not fit into a bin of 20"):
        first_fit_decreasing([3, 21], 20)


def test_collate_by_hand():
    one = Sample(np.array([7, 8, 9], np.int32), np.array([False, True, True]), "")
    two = Sample(np.array([5, 6], np.int32), np.array([False, True]), "")
    batch = collate([(one, two), (two,)], pad_token_id=0)
    assert batch.input_ids.tolist() == [[7, 8, 9, 5, 6], [5, 6, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True], [False, True, False, False, False]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_of_packed_samples_equal_the_samples_apart(attention):
    """Nothing is seen across a border: per-token losses agree within 1e-5."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(attn_implementation=attention)).eval()
    samples = [sample(length, seed) for seed, length in enumerate([9, 5, 17, 2, 12, 3, 8])]
    rows = pack(samples, 24)
    assert len(rows) < len(samples)
    batch = collate(rows, 0)
    packed = token_losses(model, batch)
    for row, losses in zip(rows, packed, strict=True):
        start = 0
        for one in row:
            alone = token_losses(model, collate([(one,)], 0))[0]
            torch.testing.assert_close(losses[start + 1 : start + len(one.ids)], alone[1:], atol=1e-5, rtol=0)
            start += len(one.ids)


@torch.no_grad()
def token_losses(model, batch):
    """[B, T]: −log p of each token given those before it; 0 for the first."""
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(-logprobs, (1, 0))
