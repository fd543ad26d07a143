"""vLLM as a rollout engine needs it: its environment and its arguments."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from conveyor.config import UserError, sections
from conveyor.models.rope import rope_parameters
from conveyor.workers.engine_adapter import engine_arguments

if TYPE_CHECKING:
    from vllm import LLMEngine

CPU_PREFILL_TOKENS = 2048
"""Tokens of a step of an engine on CPU, unless one request may have more."""


def set_environment(rollout: sections.Rollout, cores: tuple[int, ...] | None) -> None:
    """vLLM reads these when it is imported, so this comes before."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if cores is not None:
        ranks = rollout.tensor_parallel_size
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(rollout.cpu_kv_cache_gib)
        if rollout.enforce_eager is not False:
            # Without graph capture vLLM still compiles one small sampling function: seconds for nothing.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cores[rank::ranks])) for rank in range(ranks))


def config_overrides(model: sections.Model) -> dict[str, Any]:
    """What the engine's copy of the model's configuration must say for its log-probs to be the trainer's."""
    rope = rope_parameters(model)
    return ({} if rope is None else {"rope_parameters": rope}) | ({"head_dtype": "float32"} if model.fp32_head else {})


def start_engine(
    model: sections.Model, rollout: sections.Rollout, max_model_len: int | None, lora: sections.Lora | None = None
) -> tuple[LLMEngine, Any]:
    from transformers import AutoTokenizer
    from vllm import EngineArgs, LLMEngine
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    unknown = sorted(set(rollout.engine_args) - {field.name for field in fields(EngineArgs)})
    if unknown:
        raise UserError(f"rollout.engine_args.{unknown[0]}: vLLM's EngineArgs knows no such argument")
    tokenizer = model.tokenizer or model.path
    arguments: dict[str, Any] = dict(
        model=model.path,
        tokenizer=tokenizer,
        dtype=rollout.dtype or model.dtype,
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_concurrent_requests,
        tensor_parallel_size=rollout.tensor_parallel_size,
        # An engine's devices are of one node. Within a Ray actor vLLM would ask Ray for more of them.
        distributed_executor_backend="mp" if rollout.tensor_parallel_size > 1 else None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_sleep_mode=bool(rollout.sleep) and not current_platform.is_cpu(),
        enforce_eager=current_platform.is_cpu() if rollout.enforce_eager is None else rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        # Log-probs of the distribution sampled from: after temperature, top_p, top_k.
        logprobs_mode="processed_logprobs",
        # With a step in flight, tokens of the old weights would arrive after an install.
        async_scheduling=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if rollout.routing_replay:
        arguments["enable_return_routed_experts"] = True
    if not current_platform.is_cpu():
        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")  # idle until `open_stream`
    if lora is not None:
        arguments |= engine_arguments(lora, model, rollout.engine_args)
    if current_platform.is_cpu():
        # A request that is prefilled in parts sets its seeded generator back, which generators on CPU cannot do. All running
        # requests are prefilled anew after an install.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(max_model_len or 0, CPU_PREFILL_TOKENS)
    arguments |= rollout.engine_args
    if overrides := config_overrides(model) | arguments.get("hf_overrides", {}):
        arguments["hf_overrides"] = overrides
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    return engine, AutoTokenizer.from_pretrained(tokenizer)
