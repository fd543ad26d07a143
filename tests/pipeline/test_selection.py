"""Which groups stay in under dynamic sampling, against all that could happen."""

import random
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.selection import Selection


def by_hand(equal: list[bool], size: int, most: int) -> list[tuple[bool, int]]:
    """Of groups in prompt order: (stays, step)."""
    step = kept = seen = 0
    found = []
    for one in equal:
        stays = not one or seen - kept == most - size
        found.append((stays, step))
        kept, seen = kept + stays, seen + 1
        if kept == size:
            step, kept, seen = step + 1, 0, 0
    return found


def always_dropped(known: list[bool | None], group: int, size: int, most: int) -> bool:
    """Whether a group is left out, whatever the rewards that are not there yet turn out to be."""
    unknown = [place for place in range(group) if known[place] is None]
    for guess in product((True, False), repeat=len(unknown)):
        filled = [bool(one) for one in known]
        for place, one in zip(unknown, guess, strict=True):
            filled[place] = one
        if by_hand(filled, size, most)[group][0]:
            return False
    return True


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3), spare=st.integers(0, 4), equal=st.lists(st.booleans(), min_size=1, max_size=9), seed=st.integers(0, 1 << 30))
def test_what_stays_and_in_which_step_does_not_depend_on_the_order_of_news(size: int, spare: int, equal: list[bool], seed: int) -> None:
    rng = random.Random(seed)
    selection, admitted, judged = Selection(0, size, size + spare), 0, set[int]()
    kept: dict[int, int] = {}
    dropped: dict[int, int] = {}
    known: list[bool | None] = [None] * len(equal)
    wanted = by_hand(equal, size, size + spare)
    while len(judged) < len(equal):
        waiting = [group for group in range(admitted) if group not in judged]
        moves = [*waiting, *([-1] if admitted < len(equal) else [])]
        group = rng.choice(moves)
        if group == -1:
            selection.admit(admitted)
            admitted += 1
            continue
        judged.add(group)
        known[group] = equal[group]
        stay, out = selection.judged(group, equal[group])
        assert not kept.keys() & {g for g, _ in stay} and not dropped.keys() & {g for g, _ in out}, "said twice"
        kept |= dict(stay)
        dropped |= dict(out)
        settled = next((g for g in range(admitted) if g not in judged), admitted)
        assert {g: step for g, (stays, step) in enumerate(wanted[:settled]) if stays} == kept
        assert selection.step == [*wanted, (False, _step_after(wanted, size))][settled][1]
        assert {g: step for g, (stays, step) in enumerate(wanted[:settled]) if not stays} == dropped, "booked to the step it is of"
        # A group is replaced early only if it is certain to be left out.
        replaced = set(range(settled, admitted)) - set(selection.waiting)
        assert all(always_dropped(known, g, size, size + spare) for g in replaced)
        in_step = sum(step == selection.step for step in kept.values())
        assert selection.holds == in_step + len(selection.waiting)
    assert kept == {g: step for g, (stays, step) in enumerate(wanted) if stays}
    assert dropped == {g: step for g, (stays, step) in enumerate(wanted) if not stays}


def _step_after(wanted: list[tuple[bool, int]], size: int) -> int:
    return sum(stays for stays, _ in wanted) // size


def test_by_hand() -> None:
    """Two groups a step, four sampled at most: 0 and 2 make step 0; of 3, 4, 5, 6, all equal, two stay."""
    selection = Selection(0, 2, 4)
    for group in range(7):
        selection.admit(group)
    assert selection.judged(1, True) == ([], []) and 1 not in selection.waiting, "two may go, so it goes whatever group 0 is"
    assert selection.judged(2, False) == ([], [])
    assert selection.judged(0, False) == ([(0, 0), (2, 0)], [(1, 0)])
    assert [selection.judged(group, True) for group in (4, 3)] == [([], []), ([], [(3, 1), (4, 1)])]
    assert selection.judged(5, True) == ([(5, 1)], [])
    assert selection.judged(6, True) == ([(6, 1)], []) and selection.step == 2 and selection.holds == 0
