"""What lies on each GPU, against numbers that are known."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.plan.fit_advice import advice
from conveyor.plan.hardware import GPUS
from conveyor.plan.keeping import NF4_BITS, Adapter, Keeping
from conveyor.plan.known_models import NAMED
from conveyor.plan.lengths import LengthFacts
from conveyor.plan.memory import GroupMemory, Shapes, group_memory, score_shards, train_items
from tests.plan.recipes import recipe

LENGTHS = LengthFacts(prompt=200, response=300, resident=500, longest=1000)
SMALL, LARGE, SPARSE = NAMED["8b"], NAMED["70b"], NAMED["30b-a3b"]
STATES = ("trained weights", "gradients", "optimizer")


def tables(made: Any, name: str = "8b") -> dict[str, GroupMemory]:
    shapes = Shapes(NAMED[name], NAMED[name])
    return {table.group: table for table in group_memory(made, shapes, GPUS["h100"], LENGTHS)}


def of_states(kept: Keeping, ranks: int) -> tuple[float, float]:
    """Bytes a parameter of Llama-3-8B on a GPU, and in host memory."""
    items, host, _ = train_items(kept, [SMALL], ranks, tokens=1000)
    return sum(items.get(name, 0.0) for name in STATES) / SMALL.parameters, sum(host.values()) / SMALL.parameters


@pytest.mark.parametrize(
    ("stage", "ranks", "right"),
    [(1, 1, 2 + 6 + 12), (1, 4, 2 + 6 + 12 / 4), (2, 4, 2 + (4 + 12) / 4), (2, 1, 18), (3, 4, 18 / 4), (3, 16, 18 / 16)],
)
def test_mixed_precision_adam_takes_18_bytes_a_parameter_shared_by_stage(stage: int, ranks: int, right: float) -> None:
    assert of_states(Keeping(size=2, stage=stage), ranks) == (pytest.approx(right), 0)


@pytest.mark.parametrize(("stage", "ranks", "right"), [(0, 1, 16), (0, 2, 16), (1, 2, 4 + 4 + 12 / 2), (2, 2, 4 + 16 / 2), (3, 2, 20 / 2)])
def test_fp32_adam_takes_16_bytes_a_parameter_and_4_more_under_zero(stage: int, ranks: int, right: float) -> None:
    assert of_states(Keeping(size=4, stage=stage), ranks)[0] == pytest.approx(right)


@pytest.mark.parametrize(("stage", "device", "host"), [(1, 2 + 6, (12 + 4) / 4), (2, 2, (12 + 4 + 4) / 4), (3, 2 / 4, (12 + 4 + 4) / 4)])
def test_an_optimizer_in_host_memory_takes_its_gradients_along(stage: int, device: float, host: float) -> None:
    assert of_states(Keeping(size=2, stage=stage, optimizer_place="cpu"), 4) == (pytest.approx(device), pytest.approx(host))


def test_nvme_takes_the_states_and_weights_may_go_too() -> None:
    kept = Keeping(size=2, stage=3, optimizer_place="nvme", weights_place="cpu")
    items, host, disk = train_items(kept, [SMALL], 4, tokens=1000)
    assert disk == {"optimizer": SMALL.parameters * 12 / 4}
    assert host["trained weights"] == SMALL.parameters * 2 / 4
    assert not {"trained weights", "gradients", "optimizer"} & items.keys()
    assert items["gathered layers"] > 0


def test_adapters_are_trained_and_the_rest_lies_there() -> None:
    kept = Keeping(size=2, stage=1, adapter=Adapter(rank=16))
    items, _, _ = train_items(kept, [SMALL], 1, tokens=1000)
    # 41.9 million of rank 16 over all linear layers of Llama-3-8B, as peft counts them.
    factors = SMALL.adapter_parameters(16)
    assert factors == 41_943_040
    assert items["trained weights"] == 2 * (SMALL.parameters + factors)
    assert items["gradients"] + items["optimizer"] == factors * (6 + 12)


def test_four_bits_are_4127_thousandths() -> None:
    kept = Keeping(size=2, stage=1, adapter=Adapter(rank=16, nf4=True))
    linear = SMALL.linear_parameters
    assert linear == 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14_336)
    rest = SMALL.parameters - linear + SMALL.adapter_parameters(16)
    assert kept.weight_bytes(SMALL) == pytest.approx(linear * 4.127 / 8 + 2 * rest)
    assert pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-3) == NF4_BITS


def test_a_mixture_of_experts_is_trained_whole() -> None:
    items, _, _ = train_items(Keeping(size=2, stage=3), [SPARSE], 16, tokens=1000)
    assert sum(items[name] for name in STATES) == pytest.approx(18 * 30.532e9 / 16, rel=1e-4)


def test_recomputation_keeps_an_input_a_layer_and_one_layer() -> None:
    plain, _, _ = train_items(Keeping(size=2, stage=3), [SMALL], 8, tokens=4096)
    again, _, _ = train_items(Keeping(size=2, stage=3, checkpointing=True), [SMALL], 8, tokens=4096)
    layer = 2 * (10 * 4096 + 128 * (2 * 32 + 2 * 8) + 4 * 14_336) * 4096
    assert plain["train activations"] - 1e9 == 32 * layer
    assert again["train activations"] - 1e9 == 32 * 2 * 4096 * 4096 + layer


@pytest.mark.parametrize(
    ("limit", "sequence_ranks", "ranks", "right"),
    [(None, 1, 4, 4 * 3000), (8192, 1, 4, 8192), (None, 2, 4, 8 * 1500), (4096, 2, 4, 4096), (None, 1, 1, 16 * 3000)],
)
def test_tokens_of_a_rank(limit: int | None, sequence_ranks: int, ranks: int, right: int) -> None:
    kept = Keeping(size=2, stage=3, row_limit=limit, sequence_ranks=sequence_ranks)
    assert kept.rank_tokens(16, 3000, ranks) == right


def test_score_models_are_whole_or_in_parts_as_the_recipe_says() -> None:
    apart = {"devices": {"rollout": 8, "score": 8, "train": 8}, "roles": {}}
    whole, parts = (recipe("grpo", **apart, score={"zero_stage": stage}) for stage in (0, 3))
    assert (score_shards(whole, "score"), score_shards(parts, "score")) == (1, 8)
    assert tables(whole, "70b")["score"].items["reference weights"] == 2 * LARGE.parameters
    assert tables(parts, "70b")["score"].items["reference weights"] == 2 * LARGE.parameters / 8
    assert not tables(whole, "70b")["score"].fits
    assert tables(parts, "70b")["score"].fits
    # A reward model has a score of one number in the place of the output layer.
    assert tables(whole)["score"].items["judge weights"] == 2 * (SMALL.parameters - 128_256 * 4096 + 4096)


def test_parts_of_score_models_may_lie_in_host_memory() -> None:
    made = recipe("grpo", devices={"rollout": 8, "score": 2, "train": 8}, roles={}, score={"zero_stage": 3, "offload_parameters": "cpu"})
    table = tables(made)["score"]
    assert "reference weights" not in table.items
    assert table.host["reference weights"] == SMALL.parameters


def test_what_waits_for_its_turn_is_not_on_the_gpu() -> None:
    table = GroupMemory("all", {"reserved": 3.0, "a": 10.0, "b": 4.0, "c": 9.0}, 20.0, turns=(("a",), ("b", "c")))
    assert table.total == 3 + 13
    assert table.fits
    assert GroupMemory("all", table.items, 20.0).total == 26


def test_advice_names_settings_that_make_it_fit() -> None:
    made = recipe("grpo", devices={"rollout": 8, "score": 8, "train": 16}, roles={}, model={"gradient_checkpointing": True})

    def tables_of(changed: Any) -> list[GroupMemory]:
        return list(tables(changed, "70b").values())

    assert advice(made, "rollout", tables_of) == "rollout.tensor_parallel_size 4"
    assert advice(made, "score", tables_of) == "score.zero_stage 3"
    assert advice(made, "train", tables_of) == "train.offload_optimizer cpu"
    few = recipe("grpo", devices={"rollout": 8, "score": 8, "train": 1}, roles={}, model={"gradient_checkpointing": True})
    assert advice(few, "train", tables_of).endswith(", and then devices.train: more GPUs, or a smaller model")
