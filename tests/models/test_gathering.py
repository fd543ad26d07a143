"""How much of a model under ZeRO-3 is on a rank while its weights are published or sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conveyor.models import train_engine
from conveyor.workers.reports import Publication
from conveyor.workers.weight_stream import layout_of
from conveyor.workers.weight_sync import Bucket, BucketWriter, publish, read
from tests.models.ranks import spawn
from tests.models.test_train_engine import engine, meet, tiny_model

LIMIT = 60_000
"""Bytes of a gather; the largest tensor of the model has more."""


class Store(list[Bucket]):
    def put(self, bucket: Bucket) -> int:
        self.append(Bucket(bucket.places, bucket.data.copy()))
        return len(self) - 1

    def get(self, reference: int) -> Bucket:
        return self[reference]


def materialised(model: torch.nn.Module) -> int:
    """Bytes of the parameters that are whole on this rank."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.numel())


def check_gathering(rank: int, ranks: int, port: int, folder: Path) -> None:
    meet(rank, ranks, port)
    train_engine.GATHER_BYTES = LIMIT
    trained, right, most = engine(zero_stage=3), dict(tiny_model().named_parameters()), 0
    total, largest = sum(p.nbytes for p in right.values()), max(p.nbytes for p in right.values())

    def walk():
        nonlocal most
        for name, tensor in trained.named_weights():
            most = max(most, materialised(trained.model))
            yield name, tensor

    assert materialised(trained.model) == 0
    store = Store()
    publication = publish(walk(), 1, "actor", verify=True, keep=rank == 0, put=store.put, writer=BucketWriter(LIMIT))
    assert 0 < most <= max(LIMIT, largest) < total / 3, (most, largest, total)
    assert materialised(trained.model) == 0, "let go of again"
    if rank:
        assert publication is None and not store
    else:
        assert isinstance(publication, Publication) and publication.nbytes == total and len(store) > 3
        arrived = dict(read(publication, get=store.get))
        assert arrived.keys() == right.keys() and all(torch.equal(arrived[name], right[name]) for name in right)
    names = [place.name for place in layout_of(trained.named_weights(cpu=False))]
    (folder / str(rank)).write_text("\n".join(names))


@pytest.mark.slow
def test_no_rank_holds_more_than_a_gather_of_the_model(tmp_path: Path) -> None:
    spawn(check_gathering, 2, tmp_path)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() != ""
