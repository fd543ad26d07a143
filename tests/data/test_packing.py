import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.data.packing import first_fit_decreasing, lay_out


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


def test_laid_out_by_hand():
    packed, padded = lay_out([[7, 8, 9], [5, 6]], packed=True), lay_out([[7, 8, 9], [5, 6]], packed=False)
    assert packed.input_ids.tolist() == [[7, 8, 9, 5, 6]] and packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert padded.input_ids.tolist() == [[7, 8, 9], [5, 6, 0]] and padded.position_ids.tolist() == [[0, 1, 2]] * 2
    assert packed.starts.tolist() == [0, 3] and padded.starts.tolist() == [0, 3]
    assert packed.lengths.tolist() == padded.lengths.tolist() == [3, 2]


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=9), st.booleans())
def test_every_sample_lies_where_it_is_said_to(samples, packed):
    tokens = lay_out(samples, packed)
    ids, positions = tokens.input_ids.flatten().tolist(), tokens.position_ids.flatten().tolist()
    for sample, start, length in zip(samples, tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        assert ids[start : start + length] == sample and positions[start : start + length] == list(range(length))
    assert len(ids) == (sum(map(len, samples)) if packed else len(samples) * max(map(len, samples)))
