"""`forced_lengths` for vLLM, named in `rollout.engine_args.logits_processors`."""

from __future__ import annotations

from vllm.v1.sample.logits_processor import LogitsProcessor

from benchmarks.forced_lengths import Lengths


class EngineLengths(Lengths, LogitsProcessor):
    pass
