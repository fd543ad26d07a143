"""New weights on their way from the trainer to engines and snapshots, through shared memory.

    trainer                         object store                    engine, snapshot
    named weights ──▶ publish ──▶ bucket · bucket · bucket ──▶ read ──▶ named weights

A bucket is one flat byte array of about 64 MB and the places of the tensors in it, so that any
dtype (NumPy has no bfloat16) travels without conversion and readers on the same node map it
instead of copying it. While a bucket is put, the weights of the next one are gathered.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from conveyor.workers.reports import Publication, Span

BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 64
# Tensors read are views of read-only shared memory, which is what we want.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    places: tuple[Place, ...]
    data: np.ndarray
    """uint8 [bytes]"""


def publish(
    named_weights: Iterable[tuple[str, Tensor]],
    version: int,
    role: str,
    *,
    verify: bool,
    keep: bool = True,
    put: Callable[[Bucket], Any] | None = None,
    writer: BucketWriter | None = None,
) -> Publication | None:
    """Put weights into the object store; at most two buckets are held beside it: one is filled while the other is put.

    Args:
        named_weights: HF name and full tensor; a tensor need stay valid only until the next one
            is asked for (ZeRO-3 gathers and frees as it goes).
        verify: add a checksum per tensor.
        keep: False on ranks other than 0, which walk the iterator (its gathers are collective)
            and get None.
        put: stores a copy of a bucket and returns its reference, in a thread of its own; default: `ray.put`.
        writer: kept by the caller from version to version, so that its memory is touched for the first time only once.
    """
    start = time.time()
    if not keep:
        for _ in named_weights:
            pass
        return None
    if put is None:
        import ray

        put = ray.put
    checksums: dict[str, str] = {}
    references: list[Future[Any]] = []
    waiting, nbytes = writer or BucketWriter(), 0

    def full() -> None:
        if references:
            references[-1].result()  # whose array is filled next
        references.append(thread.submit(put, waiting.take()))

    with ThreadPoolExecutor(1, "publish") as thread:
        for name, tensor in named_weights:
            assert name not in checksums, f"{name} was published twice"
            checksums[name] = checksum(tensor) if verify else ""
            nbytes += tensor.nbytes
            if not waiting.fits(tensor):
                full()
            waiting.add(name, tensor)
        if waiting.places:
            full()
    buckets = tuple([reference.result() for reference in references])
    return Publication(version, role, buckets, checksums if verify else None, nbytes, Span(start, time.time()))


def read(publication: Publication, *, get: Callable[[Any], Bucket] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The published tensors, a bucket at a time, in the order of publishing.

    They are views of **read-only** shared memory: copy from them, never write to them.
    """
    if get is None:
        import ray

        get = ray.get
    for reference in publication.buckets:
        bucket = get(reference)
        yield from views(bucket.places, torch.from_numpy(bucket.data))


def views(places: Iterable[Place], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in a bucket. `data`: uint8 [bytes]."""
    for place in places:
        flat = data[place.offset : place.offset + prod(place.shape) * place.dtype.itemsize]
        yield place.name, flat.view(place.dtype).view(place.shape)


def checked(
    weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, str] | None, mismatched: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Passes weights on; appends to `mismatched` the names whose checksum differs from the
    publisher's, is not known, or never came. With `checksums` None it only passes on."""
    missing = dict(checksums or {})
    for name, tensor in weights:
        if checksums is not None and checksum(tensor) != missing.pop(name, None):
            mismatched.append(name)
        yield name, tensor
    mismatched.extend(missing)


def checksum(tensor: Tensor) -> str:
    """128-bit xxHash of dtype, shape and content."""
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(flat_bytes(tensor.detach().cpu()).numpy().data)
    return digest.hexdigest()


def flat_bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes], on the tensor's device"""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class BucketWriter:
    """Copies tensors behind each other into one of two arrays, which are used for bucket after bucket: memory touched for the first time
    costs several times the copy. A tensor larger than a bucket has the bucket for itself."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.places: list[Place] = []
        self.used = 0
        self.data = torch.empty(0, dtype=torch.uint8)
        self._other = torch.empty(0, dtype=torch.uint8)

    def fits(self, tensor: Tensor) -> bool:
        return not self.places or self.used + tensor.nbytes <= self.bucket_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        if not self.places:
            needed = max(self.bucket_bytes, tensor.nbytes)
            if len(self.data) < needed:
                self.data = torch.empty(needed, dtype=torch.uint8)
        self.data[self.used : self.used + tensor.nbytes] = flat_bytes(tensor)
        self.places.append(Place(name, tensor.dtype, tuple(tensor.shape), self.used))
        self.used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def take(self) -> Bucket:
        """The bucket so far, a view that stands until the first `add` after the next `take`."""
        # `used` is rounded up, perhaps beyond the array, where slicing stops. NumPy's empty arrays
        # have stride 0, which torch cannot view as another dtype: keep a byte of them.
        bucket = Bucket(tuple(self.places), self.data[: max(self.used, 1)].numpy())
        self.places, self.used = [], 0
        self.data, self._other = self._other, self.data
        return bucket
