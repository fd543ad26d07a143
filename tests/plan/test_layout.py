"""A cluster in words, and what lies on its nodes."""

from __future__ import annotations

import pytest

from conveyor.config import UserError
from conveyor.plan.layout import Cluster, parse_cluster, told


def test_a_cluster_in_words() -> None:
    assert parse_cluster("4x8") == Cluster((8, 8, 8, 8), 80.0)
    assert parse_cluster("1x1:141") == Cluster((1,), 141.0)
    assert str(parse_cluster("2x8:40")) == "2 nodes × 8 GPUs of 40 GiB"
    assert str(Cluster((8, 4))) == "2 nodes with 8 + 4 GPUs of 80 GiB"


@pytest.mark.parametrize("text", ["", "8", "4x", "x8", "0x8", "4x0", "4x8:", "4x8:0", "4×8", "-1x8", "4x8x2", "99999x99999"])
def test_what_is_no_cluster(text: str) -> None:
    with pytest.raises(UserError, match=r"--cluster: .*4x8"):
        parse_cluster(text)


def test_nodes_that_are_alike_are_told_once() -> None:
    slots = {"rollout": [8.0], "train": [1.0] * 16}
    assert told({"rollout": [0], "train": [1] * 8 + [2] * 8}, slots, 4) == ["node 0: rollout 8", "nodes 1–2: train 8", "node 3: nothing"]
