"""What a worker's failure means: one line with the worker, the setting to change, and what is left of the run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ray.exceptions import OutOfMemoryError as KilledForMemory
from ray.exceptions import RayActorError, RayTaskError

from conveyor.config import RunError, UserError

LESS_MEMORY = {
    "rollout": "lower rollout.gpu_memory_utilization or rollout.max_concurrent_requests",
    "score": "lower pipeline.micro_batch_size",
    "train": "lower train.max_tokens_per_micro_batch or pipeline.micro_batch_size, or set model.gradient_checkpointing",
    "fit": "lower train.max_tokens_per_micro_batch or train.micro_batch_size, or set model.gradient_checkpointing",
}
"""By stage; `fit`: of methods without a pipeline."""
LISTEN_SECONDS = 5.0
"""To the other ranks, once one of them says that it has lost another."""
NO_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory", "not enough memory", "MemoryError")
LOST = ("gloo", "NCCL", "nccl", "DistBackendError", "DistNetworkError", "Connection closed by peer", "Broken pipe", "timed out after")
"""Words of a rank that waited for another in vain."""


class WorkerDied(RunError):
    """A worker's process has ended; says which, and what is left of the run."""


@dataclass(frozen=True, slots=True)
class Who:
    """A worker, as errors name it."""

    stage: str
    """rollout, score, train, fit or rewards"""
    group: str
    index: int

    def __str__(self) -> str:
        match self.stage:
            case "rollout":
                return f"rollout engine {self.index}"
            case "rewards":
                return "the worker of reward functions"
            case "score":
                return f"score worker {self.index} of group {self.group}"
            case _:
                return f"train rank {self.index} of group {self.group}"


def failure(who: Who, error: BaseException, left: str = "") -> BaseException:
    """What ends the run when a call of a worker raises `error`. `left`: what is left of the run."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    if isinstance(cause, UserError | RunError):
        return cause
    if isinstance(error, KilledForMemory):
        return RunError(f"{who} was ended by Ray, because its node has no memory left; {_less_host_memory(who)}{left}")
    if is_out_of_memory(error):
        return RunError(f"{who} is out of memory ({_line_about_memory(error)}); {LESS_MEMORY.get(who.stage, 'lower its load')}{left}")
    if isinstance(error, RayActorError):
        return WorkerDied(f"{who} died, killed or out of memory{left}")
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host. An exception that has travelled may be known by its words only."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, torch.OutOfMemoryError | MemoryError):
        return True
    # A dead actor's report says "out of memory" among its possible reasons.
    words = NO_MEMORY[1:] if isinstance(error, RayActorError) else NO_MEMORY
    return isinstance(error, RuntimeError | RayTaskError | RayActorError) and any(word in str(error) for word in words)


def is_lost(error: BaseException) -> bool:
    """A rank that says only that others did not come to a collective, or left it."""
    return isinstance(error, RuntimeError | RayTaskError) and any(word in str(error) for word in LOST)


def last_line(error: BaseException) -> str:
    """What was raised stands last in Ray's report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def stuck(asked: list[Who], silent: list[Who], task: str, seconds: float, left: str) -> RunError:
    """Workers did not answer in time. `asked`: all that were asked together; `silent`: those that say nothing."""
    waiting = [who for who in asked if who not in silent]
    who = f"{silent[0]} has" if len(silent) == 1 else f"{', '.join(map(str, silent))} have"
    others = f"; {', '.join(map(str, waiting))} waited in vain" if waiting else ""
    return RunError(f"{who} not finished {task} within {seconds:g} s (ray.timeout){others}{left}")


def lost(asked: list[Who], task: str, error: BaseException, left: str) -> RunError:
    """All ranks say that another did not come."""
    return RunError(f"the ranks of group {asked[0].group} lost one another in {task} ({last_line(error)[:200]}){left}")


def _line_about_memory(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if any(word in line for word in NO_MEMORY)), "") or type(error).__name__


def _less_host_memory(who: Who) -> str:
    return "put fewer workers on a node, or train with train.zero_stage 3" if who.stage in ("train", "fit") else LESS_MEMORY[who.stage]
