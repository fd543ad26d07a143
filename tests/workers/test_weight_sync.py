from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.workers.weight_sync import Bucket, BucketWriter, checked, checksum, publish, read

WEIGHTS = {
    "embed": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)),
    "norm": torch.arange(5, dtype=torch.bfloat16),
    "scale": torch.tensor(1.5),
    "flags": torch.tensor([True, False, True]),
    "transposed": torch.arange(6.0).view(2, 3).t(),
}


class Store(list[Bucket]):
    """Stands for Ray's object store: a reference is a place in this list."""

    def put(self, bucket: Bucket) -> int:
        self.append(Bucket(bucket.places, bucket.data.copy()))
        return len(self) - 1

    def get(self, reference: int) -> Bucket:
        return self[reference]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 2**20])
def test_what_is_published_is_read(bucket_bytes: int) -> None:
    store = Store()
    publication = publish(WEIGHTS.items(), 3, "actor", verify=True, put=store.put, writer=BucketWriter(bucket_bytes))
    assert publication is not None
    assert (publication.version, publication.role) == (3, "actor")
    assert publication.nbytes == 7 * 3 * 4 + 5 * 2 + 4 + 3 + 6 * 4
    assert len(publication.buckets) == {1: 5, 2**20: 1}.get(bucket_bytes, len(publication.buckets))
    arrived = list(read(publication, get=store.get))
    assert [name for name, _ in arrived] == list(WEIGHTS)
    for name, tensor in arrived:
        assert tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name])


@settings(deadline=None, max_examples=50)
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=12), bucket_bytes=st.integers(1, 400))
def test_any_shapes_and_bucket_sizes(shapes: list[list[int]], bucket_bytes: int) -> None:
    weights = [(f"w{i}", torch.rand(shape, dtype=(torch.float32, torch.bfloat16)[i % 2])) for i, shape in enumerate(shapes)]
    store = Store()
    publication = publish(weights, 1, "actor", verify=True, put=store.put, writer=BucketWriter(bucket_bytes))
    assert publication is not None
    mismatched: list[str] = []
    arrived = list(checked(read(publication, get=store.get), publication.checksums, mismatched))
    assert not mismatched
    assert all(torch.equal(a, b) and m == n for (m, a), (n, b) in zip(arrived, weights, strict=True))


def test_a_tensor_may_die_when_the_next_is_asked_for() -> None:
    def gathered():
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(i)

    store = Store()
    publication = publish(gathered(), 1, "actor", verify=False, put=store.put)
    assert publication is not None
    assert [tensor[0].item() for _, tensor in read(publication, get=store.get)] == [0, 1, 2]
    assert publication.checksums is None


def test_other_ranks_only_walk_the_iterator() -> None:
    walked = []

    def gathered():
        for name in WEIGHTS:
            walked.append(name)
            yield name, WEIGHTS[name]

    assert publish(gathered(), 1, "actor", verify=True, keep=False) is None
    assert walked == list(WEIGHTS)


def test_checksum_sees_content_dtype_and_shape() -> None:
    tensor = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3).index_fill(0, torch.tensor([1]), 1e-30)]
    assert checksum(tensor) == checksum(torch.zeros(3, 2).t())
    assert len({checksum(tensor), *map(checksum, others)}) == 4


def test_changed_missing_and_unknown_tensors_are_named() -> None:
    store = Store()
    publication = publish(WEIGHTS.items(), 1, "actor", verify=True, put=store.put)
    assert publication is not None and publication.checksums is not None
    data = store[0].data.copy()
    data[0] ^= 1  # one bit of `embed`
    store[0] = replace(store[0], data=data)
    sums = {name: value for name, value in publication.checksums.items() if name != "scale"} | {"lost": "0"}
    mismatched: list[str] = []
    assert len(list(checked(read(publication, get=store.get), sums, mismatched))) == len(WEIGHTS)
    assert mismatched == ["embed", "scale", "lost"]
