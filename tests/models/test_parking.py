"""Memory that is given back while its owner waits, and comes back bit for bit."""

import gc

import pytest
import torch
from torch import distributed as dist

from conveyor.models.parking import Parking, tensors_of
from tests.models.ranks import one_rank, spawn
from tests.models.test_train_engine import DENOMINATOR, engine, ids, nll, tiny_model, update, weights

CASES = {
    1: [(stage, False, dtype) for stage in (0, 1, 2, 3) for dtype in ("float32", "bfloat16")] + [(2, True, "float32")],
    2: [(3, False, "float32")],
}
"""Ranks → (ZeRO stage, optimizer offload, dtype)."""


def updates(stage, offload, dtype, rank, parked):
    """Three updates; if `parked`, the engine waits before each, between its micro-batches and before its optimizer step."""
    trained, parking = engine(zero_stage=stage, offload_optimizer=offload, dtype=dtype), Parking()

    def wait():
        if parked:
            parking.park(trained)
            assert device_bytes(trained) == 0
            parking.unpark()

    reports = []
    for number in range(3):
        wait()
        for k in range(2):
            trained.backward(trained.forward(nll, ids(rank, number * 10 + k)), last=k == 1)
            wait()
        reports.append(trained.step(DENOMINATOR))
    wait()
    return weights(trained), reports


def device_bytes(root):
    storages = [tensor.untyped_storage() for tensor in tensors_of(root) if tensor.device.type != "meta"]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def check(rank, ranks, port, cases):
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for case in cases:
        (plain, reports), (parked, also) = updates(*case, rank, parked=False), updates(*case, rank, parked=True)
        assert also == reports, case
        for name, weight in plain.items():
            assert torch.equal(weight, parked[name]), (case, name)


@pytest.mark.parametrize("case", CASES[1])
def test_an_engine_that_waits_trains_on_bit_for_bit(case):
    one_rank()
    check(0, 1, 0, [case])


@pytest.mark.slow
def test_also_on_two_ranks():
    spawn(check, 2, CASES[2])


def live_bytes():
    """Of all tensors of this process, by storage."""
    gc.collect()
    storages = [value.untyped_storage() for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and not value.is_meta]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_waits_is_nearly_all_there_is(stage):
    """Weights, gradients, masters and moments: whatever DeepSpeed keeps them in."""
    one_rank()
    before = live_bytes()
    trained = engine(tiny_model(hidden_size=64, intermediate_size=256), zero_stage=stage, dtype="bfloat16" if stage else "float32")
    update(trained, 0, 0)
    trained.backward(trained.forward(nll, ids(0, 1)), last=False)
    parameters, parking = sum(getattr(p, "ds_numel", p.numel()) for p in trained.model.parameters()), Parking()
    moved = parking.park(trained)
    left = live_bytes() - before - moved  # host copies are tensors of this process too
    assert moved > 15 * parameters
    assert left < 0.05 * moved
    parking.unpark()


def test_views_see_their_storage_again_and_nothing_else_moves():
    flat = torch.arange(8.0)
    views, other = {"a": flat[:4], "b": [flat[4:].view(2, 2)]}, torch.ones(3)
    parking = Parking()
    assert parking.park(views) == 32
    assert flat.untyped_storage().nbytes() == 0 and other.sum() == 3
    with pytest.raises(AssertionError, match="parked already"):
        parking.park(views)
    assert parking.unpark() == 32
    assert torch.equal(flat, torch.arange(8.0)) and views["b"][0][1, 1] == 7
    flat += 1
    parking.park(views)
    parking.unpark()
    assert torch.equal(flat, torch.arange(1.0, 9.0))


def test_memory_of_a_file_stays(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(64))
    mapped = torch.from_file(str(file), size=16)
    parking = Parking()
    assert parking.park([mapped]) == 0
    parking.unpark()
    assert mapped.sum() == 0
