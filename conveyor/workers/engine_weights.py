"""What an engine has each of vLLM's worker processes do: take new weights, let go of memory and take it back.

    begin_reload ─▶ load_bucket · load_bucket · … ─▶ finish_reload        weights from the object store
    open_stream ─▶ receive · receive · …                                  weights from the trainer

vLLM loads a layer when the last of its tensors has come, so tensors must live until then: those of a bucket are views of memory that
lives as long as they do. With tensor parallelism the workers are processes of their own; a bucket reaches them as a file without a
place in any folder, which all of them map: no copy for each, no limit of /dev/shm, nothing left behind by a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conveyor.models.checkpoint_names import CheckpointNames
from conveyor.workers.weight_stream import CHUNK_BYTES, Transport, update_info
from conveyor.workers.weight_sync import Bucket, Place, checked, views


@dataclass(frozen=True, slots=True)
class BucketFile:
    """A bucket that another process of this machine can map."""

    places: tuple[Place, ...]
    path: str
    nbytes: int


@contextmanager
def bucket_file(bucket: Bucket) -> Iterator[BucketFile]:
    """A copy of a bucket in memory; what is mapped from it lives on after the end."""
    file = os.memfd_create("conveyor-bucket")
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(bucket.data.data)
        yield BucketFile(bucket.places, f"/proc/{os.getpid()}/fd/{file}", bucket.data.nbytes)
    finally:
        os.close(file)


def begin_reload(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    expect_experts(worker)
    with _config(worker):
        initialize_layerwise_reload(worker.get_model())


def load_bucket(worker: Any, bucket: Bucket | BucketFile, checksums: Mapping[str, str] | None) -> list[str]:
    """Load tensors under transformers' names, of which this worker takes its share. Returns the names of damaged ones.

    Args:
        checksums: of (at least) the bucket's tensors; None: do not look.
    """
    expected = None if checksums is None else {place.name: checksums.get(place.name, "") for place in bucket.places}
    mismatched: list[str] = []
    with _config(worker):
        worker.get_model().load_weights(_names(worker).convert(checked(_tensors(bucket), expected, mismatched)))
    return mismatched


def finish_reload(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with _config(worker):
        finalize_layerwise_reload(worker.get_model(), worker.model_config)
    worker.model_runner.reset_lora_state()
    worker.model_runner.reset_encoder_cache()
    worker.model_runner.reset_mm_cache()
    repack_tied_head(worker)


def open_stream(worker: Any, transport: Transport, address: str, port: int, size: int) -> None:
    """Meet the trainer's rank that is to send weights. Waits for it."""
    if transport == "gloo":
        from vllm.config.weight_transfer import WeightTransferConfig

        from conveyor.workers.gloo_transfer import GlooWeightTransferEngine

        # In a process of its own a worker comes wrapped, and attributes set on the wrapper stay there.
        own = getattr(worker, "worker", worker)
        own.weight_transfer_engine = GlooWeightTransferEngine(WeightTransferConfig(), own.vllm_config, own.device, own.get_model())
    packed = {"packed": True, "packed_buffer_size_bytes": CHUNK_BYTES}
    worker.init_weight_transfer_engine({"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size, **packed})


def receive(worker: Any, layout: tuple[Place, ...], checksums: Mapping[str, str] | None) -> list[str]:
    """Load the weights that the trainer sends now. Returns the names of damaged ones."""
    model, mismatched = worker.get_model(), list[str]()
    load = model.load_weights

    def convert(weights: Iterable[tuple[str, Tensor]]) -> Any:
        """What vLLM's transfer engine calls with each chunk."""
        arrived = list(weights)
        expected = None if checksums is None else {name: checksums.get(name, "") for name, _ in arrived}
        return load(_names(worker).convert(checked(arrived, expected, mismatched)))

    expect_experts(worker)
    worker.start_weight_update()
    model.load_weights = convert
    try:
        worker.update_weights(dict(update_info(layout)))
    finally:
        del model.load_weights
    worker.finish_weight_update()
    repack_tied_head(worker)
    return mismatched


def expect_experts(worker: Any) -> None:
    """Before new weights: vLLM packs the experts of a CPU layer for its kernel when it sets the kernel up, and only then, so that a
    reload would leave them in a form that the kernel reads as other numbers. A layer without kernel has it set up anew."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in worker.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None


def repack_tied_head(worker: Any) -> None:
    """vLLM's CPU layers compute with a packed copy of their weight, made anew when the weight is
    reloaded. Nothing is ever loaded into an output layer that shares the embedding's weight, so
    without this it would keep computing with the first version's."""
    from vllm.platforms import current_platform

    model = worker.get_model()
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if current_platform.is_cpu() and tied and embedding is not None and head not in (None, embedding):
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def release_kv_cache(worker: Any) -> None:
    """Free the memory of the KV cache, whose contents are lost. For engines on CPU, where vLLM has no sleep."""
    worker.released_kv_cache = [(storage, storage.nbytes()) for storage in _kv_storages(worker)]
    for storage in _kv_storages(worker):
        storage.resize_(0)


def restore_kv_cache(worker: Any) -> None:
    """Memory for the KV cache again, zero everywhere: what attention masks must be finite."""
    for storage, nbytes in worker.released_kv_cache:
        storage.resize_(nbytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
    del worker.released_kv_cache


def kv_cache_bytes(worker: Any) -> int:
    """Memory that the KV cache has now."""
    return sum(storage.nbytes() for storage in _kv_storages(worker))


def _kv_storages(worker: Any) -> list[torch.UntypedStorage]:
    storages = [tensor.untyped_storage() for tensor in _kv_tensors(worker)]
    return list({storage._cdata: storage for storage in storages}.values())


def _kv_tensors(worker: Any) -> list[Tensor]:
    """Every tensor that the attention layers and the model runner know the KV cache by."""
    runner, layers = worker.model_runner, worker.vllm_config.compilation_config.static_forward_context.values()
    found: dict[int, Tensor] = {}
    for held in [getattr(runner, "kv_caches", []), *(getattr(layer, "kv_cache", None) for layer in layers)]:
        for tensor in held if isinstance(held, list | tuple) else [held]:
            if isinstance(tensor, Tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def _names(worker: Any) -> CheckpointNames:
    """Published weights have transformers' own names, vLLM loads those of checkpoints."""
    if not hasattr(worker, "checkpoint_names"):
        worker.checkpoint_names = CheckpointNames.of(worker.model_config.model)
    names: CheckpointNames = worker.checkpoint_names
    return names


def _tensors(bucket: Bucket | BucketFile) -> Iterator[tuple[str, Tensor]]:
    if isinstance(bucket, Bucket):
        return views(bucket.places, torch.from_numpy(bucket.data))
    return views(bucket.places, torch.from_file(bucket.path, shared=False, size=bucket.nbytes, dtype=torch.uint8))


def _config(worker: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)
