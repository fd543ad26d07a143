"""Rules of the trainer's settings, which every method has."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.config.common import Common


def broken_train_rules(recipe: Common, sample: int, together: int = 1) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule that is broken.

    Args:
        sample: its tokens, at most.
        together: samples that a loss needs at once: the sides of a pair.
    """
    train, model, longest = recipe.train, recipe.model, sample * together
    if train.offload_optimizer and train.zero_stage == 0:
        yield "train.offload_optimizer", "needs train.zero_stage 1, 2 or 3"
    if train.row_tokens is not None and train.row_tokens < longest:
        what = "what is computed together" if together > 1 else "a sample"
        yield "train.max_tokens_per_micro_batch", f"{what} may have {longest} tokens, and is never cut"
    if train.sequence_parallel_size > 1 and (model.attention != "sdpa" or not model.remove_padding):
        yield "train.sequence_parallel_size", "rows that are cut over ranks need model.attention sdpa and model.remove_padding"
