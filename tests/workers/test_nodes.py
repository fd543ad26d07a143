"""Which node each slot goes to."""

import itertools
import random

import pytest

from conveyor.config import UserError
from conveyor.config.sections import Strategy
from conveyor.workers.cluster import Devices, check_devices
from conveyor.workers.nodes import Node, Wanted, assign, strategies, unfit


def nodes(*devices: float, free: tuple[float, ...] | None = None) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", count, left) for i, (count, left) in enumerate(zip(devices, free or devices, strict=True))]


def ones(group: str, count: int, strategy: Strategy = "pack") -> Wanted:
    return Wanted(group, (1.0,) * count, strategy)


@pytest.mark.parametrize(
    ("wanted", "on", "right"),
    [
        # A node that is just large enough leaves the larger one whole.
        ([ones("train", 4)], nodes(8, 4), {"train": ["n1"] * 4}),
        # On as few as can be, the emptiest first, and neighbouring ranks side by side.
        ([ones("train", 12)], nodes(4, 8, 4), {"train": ["n1"] * 8 + ["n0"] * 4}),
        ([ones("train", 6, "spread")], nodes(4, 4, 4), {"train": ["n0", "n0", "n1", "n1", "n2", "n2"]}),
        ([ones("train", 5, "spread")], nodes(1, 4), {"train": ["n0", "n1", "n1", "n1", "n1"]}),
        ([ones("train", 4, "strict_pack")], nodes(2, 4, 2), {"train": ["n1"] * 4}),
        ([ones("train", 2, "strict_spread")], nodes(1, 0, 4), {"train": ["n0", "n2"]}),
        # An engine's devices are of one node.
        ([Wanted("rollout", (4.0, 4.0))], nodes(6, 6), {"rollout": ["n0", "n1"]}),
        ([Wanted("rollout", (8.0, 8.0), "spread"), ones("train", 8)], nodes(8, 8, 8), {"rollout": ["n0", "n1"], "train": ["n2"] * 8}),
        # Single devices do not break up what a strict group or a large slot needs.
        ([ones("score", 2), ones("train", 4, "strict_pack")], nodes(4, 2), {"score": ["n1"] * 2, "train": ["n0"] * 4}),
        ([ones("score", 4, "spread"), Wanted("rollout", (4.0,))], nodes(4, 4), {"score": ["n1"] * 4, "rollout": ["n0"]}),
        # Parts of devices share one, and whole ones are not broken for them.
        ([Wanted("a", (0.5,)), Wanted("b", (0.5,)), ones("train", 1)], nodes(2), {"a": ["n0"], "b": ["n0"], "train": ["n0"]}),
        ([ones("train", 4)], nodes(8, 8, free=(2, 4)), {"train": ["n1"] * 4}),
    ],
)
def test_slots_go_to(wanted: list[Wanted], on: list[Node], right: dict[str, list[str]]) -> None:
    assert assign(wanted, on) == right


def test_another_order_is_tried_where_the_first_fails() -> None:
    # Largest first, `a` would take n0, which `b` alone can use: it fits nowhere else.
    wanted = [ones("a", 4, "strict_pack"), ones("b", 3, "strict_pack"), ones("c", 3, "strict_pack")]
    found = assign(wanted, nodes(6, 4))
    assert found == {"a": ["n1"] * 4, "b": ["n0"] * 3, "c": ["n0"] * 3}
    assert assign([ones("a", 2, "spread"), ones("b", 3, "strict_pack")], nodes(3, 2)) == {"a": ["n1", "n1"], "b": ["n0"] * 3}


def test_parts_of_a_device_are_of_one_device() -> None:
    thirds = [Wanted(name, (0.6,)) for name in "abc"]
    assert assign(thirds, nodes(2)) is None  # 1.8 devices, but each has room for one of them
    assert assign(thirds, nodes(2, 1)) is not None
    assert assign([Wanted("a", (0.25,)), Wanted("b", (0.75,))], nodes(1)) is not None
    assert assign([ones("whole", 1)], nodes(1, free=(0.9,))) is None


@pytest.mark.parametrize(
    ("wanted", "on", "reason"),
    [
        (
            [ones("train", 12, "strict_pack")],
            nodes(8, 8),
            "ray.placement.train: strict_pack needs 12 GPUs on one node; the largest, 10.0.0.0, has 8",
        ),
        (
            [ones("train", 3, "strict_spread")],
            nodes(8, 8),
            "ray.placement.train: strict_spread needs 3 nodes with 1 GPUs each; 2 have",
        ),
        (
            [Wanted("rollout", (8.0, 8.0))],
            nodes(4, 4, 4, 4),
            "devices.rollout: one worker needs 8 GPUs of one node; the largest, 10.0.0.0, has 4",
        ),
        (
            [Wanted("rollout", (8.0,)), ones("train", 6, "strict_pack")],
            nodes(8, 4, 4),
            "devices: no way to lay out rollout: 1 × 8; train: 6 × 1, strict_pack on the nodes: 10.0.0.0 has 8, 2 nodes have 4",
        ),
        ([ones("train", 8, "strict_pack")], nodes(8, free=(1,)), None),
    ],
)
def test_what_can_never_fit_is_said(wanted: list[Wanted], on: list[Node], reason: str | None) -> None:
    assert unfit(wanted, on, "GPUs") == reason


def test_the_check_before_a_run_says_it() -> None:
    there = Devices("GPU", 16, tuple(nodes(8, 8)))
    assert check_devices({"rollout": 8, "train": 8}, there, {"rollout": 4}) == {"rollout": [4.0, 4.0], "train": [1.0] * 8}
    with pytest.raises(UserError, match=r"ray\.placement\.train: strict_pack needs 12 GPUs on one node"):
        check_devices({"train": 12}, there, placement={"train": "strict_pack"})
    with pytest.raises(UserError, match=r"asked for 20 GPUs \(train: 20\), the cluster has 16 GPUs \(2 nodes have 8\)"):
        check_devices({"train": 20}, there)
    with pytest.raises(UserError, match=r"devices\.rollout: one worker needs 8 GPUs of one node; the largest, 10\.0\.0\.0, has 4"):
        check_devices({"rollout": 8}, Devices("GPU", 8, tuple(nodes(4, 4))), {"rollout": 8})


def test_no_node_is_ever_given_more_than_it_has() -> None:
    draw = random.Random(3)
    kinds: tuple[Strategy, ...] = ("pack", "spread", "strict_pack", "strict_spread")
    placed = 0
    for _ in range(300):
        on = nodes(*(draw.choice((0.5, 1, 2, 4, 8)) for _ in range(draw.randint(1, 4))))
        sizes = {f"g{i}": [draw.choice((0.3, 0.5, 1, 1, 2, 4))] * draw.randint(1, 4) for i in range(draw.randint(1, 4))}
        asked = strategies(sizes, {group: draw.choice(kinds) for group in sizes})
        found = assign(asked, on)
        if found is None:
            continue
        placed += 1
        for node in on:
            used = [amount for group in asked for amount, place in zip(group.slots, found[group.group], strict=True) if place == node.id]
            assert sum(used) <= node.devices + 1e-6
        for group in asked:
            places = found[group.group]
            assert len(places) == len(group.slots)
            assert group.strategy != "strict_pack" or len(set(places)) == 1
            assert group.strategy != "strict_spread" or len(set(places)) == len(places)
            assert [node for node, _ in itertools.groupby(places)] == list(dict.fromkeys(places)), "ranks of a node lie side by side"
    assert placed > 100
