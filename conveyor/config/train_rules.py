"""Rules of the trainer's settings, which every method has."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.config import sections
from conveyor.config.common import Common


def broken_train_rules(recipe: Common, sample: int, together: int = 1) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule that is broken.

    Args:
        sample: its tokens, at most.
        together: samples that a loss needs at once: the sides of a pair.
    """
    train, model, longest = recipe.train, recipe.model, sample * together
    yield from _offload(train)
    if train.row_tokens is not None and train.row_tokens < longest:
        what = "what is computed together" if together > 1 else "a sample"
        yield "train.max_tokens_per_micro_batch", f"{what} may have {longest} tokens, and is never cut"
    if train.router_aux_loss != "sequence" and train.router_aux_loss_coef is None:
        yield "train.router_aux_loss", "says how the loss of train.router_aux_loss_coef counts, which is off"
    if train.sequence_parallel_size > 1 and (model.attention != "sdpa" or not model.remove_padding):
        yield "train.sequence_parallel_size", "rows that are cut over ranks need model.attention sdpa and model.remove_padding"


def _offload(train: sections.Train) -> Iterator[tuple[str, str]]:
    optimizer, parameters = train.offload_optimizer, train.offload_parameters
    if optimizer == "cpu" and train.zero_stage == 0:
        yield "train.offload_optimizer", "needs train.zero_stage 1, 2 or 3"
    if optimizer == "nvme" and train.zero_stage < 3:
        yield "train.offload_optimizer", "nvme needs train.zero_stage 3"
    if parameters != "none" and train.zero_stage < 3:
        yield "train.offload_parameters", "needs train.zero_stage 3, which partitions them"
    if parameters != "none" and optimizer == "none":
        yield "train.offload_parameters", "needs train.offload_optimizer cpu or nvme: weights are offloaded with their optimizer"
    if "nvme" in (optimizer, parameters) and train.nvme_path is None:
        yield "train.nvme_path", "name the folder on a local drive that nvme is to use"
    if train.nvme_path is not None and "nvme" not in (optimizer, parameters):
        yield "train.nvme_path", "nothing is offloaded to nvme"


def broken_score_rules(score: sections.Score) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule that the section `score` breaks."""
    if score.offload_parameters != "none" and score.zero_stage != 3:
        yield "score.offload_parameters", "needs score.zero_stage 3, which cuts models into parts"
    if (score.offload_parameters == "nvme") != (score.nvme_path is not None):
        yield "score.nvme_path", "names the folder on a local drive that score.offload_parameters: nvme uses; give both or neither"
