"""vLLM's weight transfer over gloo: an engine's end, on CPU. Imports vLLM, so only its own processes import this."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from conveyor.workers.weight_stream import GlooGroup, chunks, nbytes
from conveyor.workers.weight_sync import Place, views


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with another group, and memory of the CPU to receive in."""

    def init_transfer_engine(self, init_info: Any) -> None:
        rank = self.parallel_config.rank + init_info.rank_offset
        self._group: GlooGroup | None = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)
        self._chunk_bytes = init_info.packed_buffer_size_bytes

    def receive_weights(self, update_info: Any) -> None:
        assert self._group is not None, "open_stream comes first"
        model: Any = self.model
        named = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        layout = [Place(name, getattr(torch, dtype), tuple(shape), 0) for name, dtype, shape in named]
        for places in chunks(layout, self._chunk_bytes):
            chunk = torch.empty(sum(map(nbytes, places)), dtype=torch.uint8)
            self._group.broadcast(chunk)
            self._group.wait()
            model.load_weights(_tensors(places, chunk))

    def shutdown(self) -> None:
        self._group = None


def _tensors(places: list[Place], chunk: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of a chunk, which has memory of its own: vLLM keeps them until the rest of their layer has come."""
    tensors, used = [], 0
    for place in places:
        # Tensors stand behind each other without gaps, so one may begin where its dtype cannot be viewed.
        part = chunk[used : used + nbytes(place)]
        aligned = part if used % place.dtype.itemsize == 0 else part.clone()
        tensors += list(views([place], aligned))
        used += nbytes(place)
    return tensors
