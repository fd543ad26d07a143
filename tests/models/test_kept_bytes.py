"""The planner's bytes a parameter are those that DeepSpeed keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from conveyor.plan.keeping import BYTES, Keeping
from conveyor.plan.memory import train_items
from conveyor.plan.models import shape_from_config
from tests.models.kept_bytes import SIZES, Case, count, result
from tests.models.ranks import spawn
from tests.tiny import tiny_config

CASES: list[Case] = [("float32", 0), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)]
STATES = ("trained weights", "gradients", "optimizer")


@pytest.mark.long
@pytest.mark.slow
def test_the_engine_keeps_what_the_planner_counts(tmp_path: Path) -> None:
    spawn(count, 2, tmp_path, CASES)
    shape = shape_from_config(tiny_config(**SIZES).to_dict())
    for dtype, stage in CASES:
        items, _, _ = train_items(Keeping(size=BYTES[dtype], stage=stage), [shape], 2, tokens=8)
        counted = sum(items[name] for name in STATES) / shape.parameters
        found = result(tmp_path, dtype, stage)
        if stage < 3:
            assert found == pytest.approx(counted, rel=0.01), (dtype, stage)
        else:  # layers that are put together, and the bucket of gradients, which is as large as so small a model
            besides = (items["gathered layers"] + items["reduced at a time"]) / shape.parameters
            assert counted + 2 < found < counted + besides
