"""Which groups make a step: by prompt, or the first that finish, within their deadlines."""

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.pipeline.membership import Membership
from conveyor.pipeline.run_plan import RunPlan


def plan(*step_groups: int, staleness: int = 1, order: str = "completion", **more) -> RunPlan:
    return RunPlan(step_groups=step_groups, samples_per_group=1, samples_per_update=1, micro_batch_size=1, max_staleness=staleness,
                   order=order, **more)  # fmt: skip


def admit(membership: Membership, version: int) -> list[int]:
    admitted = []
    while membership.may_admit(version):
        admitted.append(membership.admit(version))
    return admitted


def test_the_first_that_finish_make_a_step_and_the_late_keep_their_deadline() -> None:
    membership = Membership(plan(2, 2, 2))
    assert admit(membership, 0) == [0, 1, 2, 3], "those of steps 0 and 1"
    assert [membership.step_of(0), membership.finish(3), membership.finish(2)] == [None, 0, 0]
    membership.forget(0)
    assert admit(membership, 1) == [4, 5]
    # Groups 0 and 1 are of version 0: step 1 is their last chance, so it keeps room for them.
    assert [membership.finish(5), membership.finish(4)] == [2, 2]
    assert [membership.finish(1), membership.finish(0)] == [1, 1]


def test_on_policy_completion_order_keeps_the_prompts_of_a_step() -> None:
    membership = Membership(plan(2, 2, staleness=0))
    assert admit(membership, 0) == [0, 1]
    assert [membership.step_of(1), membership.finish(1)] == [0, 0]


def test_what_a_checkpoint_carries_comes_first_in_the_resumed_run() -> None:
    membership = Membership(plan(2, 2, 2))
    admit(membership, 0)
    for group in (3, 1):
        membership.finish(group)
    assert membership.untrained(1) == ((0, 2), 4)
    resumed = Membership(plan(2, 2, 2, start_step=1, carried=(0, 2), next_group=4))
    assert admit(resumed, 1) == [0, 2, 4, 5]
    assert [resumed.finish(group) for group in (5, 0, 2, 4)] == [1, 1, 2, 2]
    assert Membership(plan(2, 2, order="prompt")).untrained(1) == ((), 2)


def test_a_checkpoint_names_groups_that_already_belong_to_a_later_step() -> None:
    membership = Membership(plan(1, 1, 1))
    admit(membership, 0)
    assert [membership.finish(1), membership.finish(0)] == [0, 1]
    assert membership.untrained(1) == ((0,), 2)
    resumed = Membership(plan(1, 1, 1, start_step=1, carried=(0,), next_group=2))
    assert resumed.untrained(1) == ((0,), 2), "a run killed before it admits anything loses nothing either"


def test_a_checkpoint_of_dynamic_sampling_names_where_to_go_on() -> None:
    """On-policy: after the last group of the step. With staleness: what is in flight or kept for later, and no group that is out."""
    on_policy = Membership(plan(2, 2, staleness=0, groups_sampled_at_most=4))
    assert admit(on_policy, 0) == [0, 1]
    assert on_policy.judged(0, True) == ([], [(0, 0)])
    assert admit(on_policy, 0) == [2] and on_policy.next_group == 3
    assert on_policy.judged(2, False) == ([], [])
    assert on_policy.judged(1, False) == ([(1, 0), (2, 0)], [])
    assert on_policy.untrained(1) == ((), 3) and [on_policy.step_of(group) for group in (0, 1, 2)] == [None, 0, 0]

    ahead = Membership(plan(1, 1, 1, staleness=1, order="prompt", groups_sampled_at_most=3))
    assert admit(ahead, 0) == [0, 1]
    assert ahead.judged(1, True) == ([], [])
    assert admit(ahead, 0) == [2]
    assert ahead.judged(0, False) == ([(0, 0)], [(1, 1)])
    assert admit(ahead, 1) == [3]
    assert ahead.judged(3, False) == ([], []) and ahead.untrained(1) == ((2, 3), 4)
    assert ahead.judged(2, False) == ([(2, 1), (3, 2)], []) and ahead.next_group is None
    ahead.forget(0)
    assert ahead.untrained(1) == ((2, 3), 4) and ahead.untrained(2) == ((3,), 4)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    staleness=st.integers(1, 3),
    engines=st.integers(1, 3),
    data=st.data(),
)
def test_no_deadline_is_missed_and_every_step_is_filled(steps: list[int], staleness: int, engines: int, data) -> None:
    """Engines lag behind the newest version by anything, and groups finish in any order."""
    membership = Membership(plan(*steps, staleness=staleness))
    versions = [0] * engines
    oldest: dict[int, int] = {}
    filled = [0] * len(steps)
    trained, flight = 0, []
    while trained < len(steps):
        moves = [("admit", e) for e in range(engines) if membership.may_admit(versions[e])]
        moves += [("finish", g) for g in flight] + [("install", e) for e in range(engines) if versions[e] < trained]
        assert moves, "deadlock"
        move, which = moves[data.draw(st.integers(0, len(moves) - 1))]
        if move == "admit":
            group = membership.admit(versions[which])
            oldest[group] = versions[which]
            flight.append(group)
        elif move == "install":
            versions[which] = trained
        else:
            flight.remove(which)
            step = membership.finish(which)
            assert 0 <= step - oldest[which] <= staleness
            filled[step] += 1
            while trained < len(steps) and filled[trained] == steps[trained]:
                membership.forget(trained)
                trained += 1
    assert filled == steps and len(oldest) == sum(steps)
