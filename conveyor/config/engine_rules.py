"""What the rollout engine that is named has not, with the reason that a user is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conveyor.config import sections

ATTENTION = ("sdpa", "eager")
"""Attention of `engine: transformers`: those that take a mask for every row."""


def broken_engine_rules(rollout: sections.Rollout) -> Iterator[tuple[str, str]]:
    """(key, reason) of every setting that `rollout.engine` cannot follow."""
    if rollout.engine == "vllm":
        return
    if rollout.tensor_parallel_size > 1:
        yield "rollout.tensor_parallel_size", "an engine of transformers is on one device; use 1, or engine: vllm"
    if rollout.enforce_eager is False:
        yield "rollout.enforce_eager", "transformers captures no graphs; leave it out, or use engine: vllm"
    if rollout.routing_replay:
        yield "rollout.routing_replay", "an engine of transformers does not tell which experts its tokens go to; use engine: vllm"
    default: dict[str, Any] = {name: sections.Rollout.model_fields[name].default for name in ("gpu_memory_utilization", "cpu_kv_cache_gib")}
    for name, value in default.items():
        if getattr(rollout, name) != value:
            yield f"rollout.{name}", "is vLLM's; the cache of transformers grows with the samples that max_concurrent_requests allows"
    for name, value in rollout.engine_args.items():
        if name != "attn_implementation":
            yield f"rollout.engine_args.{name}", "engine: transformers takes no such argument, only attn_implementation"
        elif value not in ATTENTION:
            yield f"rollout.engine_args.{name}", f"engine: transformers takes {' or '.join(ATTENTION)}, not {value!r}"
