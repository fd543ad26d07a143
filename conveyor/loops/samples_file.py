"""A round's samples on disk: one line a prompt, with all its samples and what rewards say of them.

Lines are appended as prompts are finished, to a file beside; when all are there it is put in prompt order and given its name. So a
round that was killed goes on with the prompts that have no whole line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from conveyor.config import UserError
from conveyor.data.samples import Sample
from conveyor.pipeline.sampling import Sampled
from conveyor.report.jsonl import read_objects
from conveyor.run_folder import write_lines
from conveyor.types import Rollout

Line = dict[str, Any]
"""index, row (1-based), prompt, prompt_ids, samples: [{response, response_ids, finish_reason, rewards, score}]. Where a function plays
several turns, a sample has response_mask too: 1 for tokens of the policy, 0 for those of tools."""


class SamplesFile:
    """`with SamplesFile(path) as file: file.append(sampled)`, then `complete`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.growing")
        self._open: TextIO | None = None

    def done(self) -> set[int]:
        """Indices of the prompts that have a whole line. Cuts off a line that a kill left unfinished."""
        if not self._partial.exists():
            return set()
        whole = self._partial.read_bytes()
        self._partial.write_bytes(whole[: whole.rfind(b"\n") + 1])
        try:
            return {int(line["index"]) for _, line in read_objects(self._partial)}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"checkpoint.resume: {self._partial} is damaged: {error!r}") from None

    def append(self, sampled: Sampled) -> None:
        assert self._open is not None
        self._open.write(json.dumps(_line(sampled), ensure_ascii=False) + "\n")
        self._open.flush()

    def complete(self) -> None:
        """Give the file its name, its lines in prompt order."""
        lines = sorted((line for _, line in read_objects(self._partial)), key=lambda line: int(line["index"]))
        write_lines(self.path, lines)
        self._partial.unlink()

    def __enter__(self) -> SamplesFile:
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        self._open = self._partial.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that is complete.

    Raises:
        UserError: it is not there, or damaged.
    """
    try:
        if path.stat().st_size and not _ends_whole(path):
            raise ValueError("its last line is cut")
        yield from (line for _, line in read_objects(path))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint.resume: {path} is damaged: {error}") from None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _line(sampled: Sampled) -> Line:
    prompt = sampled.prompt
    scored = zip(sampled.rollouts, sampled.rewards, sampled.scores, strict=True)
    told = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
    return {"index": prompt.index, "row": prompt.row + 1, "prompt": told, "prompt_ids": list(prompt.token_ids),
            "samples": [_sample(*one) for one in scored]}  # fmt: skip


def _sample(rollout: Rollout, rewards: Mapping[str, float | None], score: float | None) -> dict[str, Any]:
    """A sample whose turns failed has no score, so it is not chosen."""
    line = {"response": rollout.text, "response_ids": rollout.response_ids.tolist(), "finish_reason": rollout.finish_reason,
            "rewards": dict(rewards), "score": score if rollout.failure is None else None}  # fmt: skip
    return line if rollout.sampled is None else line | {"response_mask": rollout.sampled.int().tolist()}


def tokens_of(prompt_ids: Sequence[int], response_ids: Sequence[int], response_mask: Sequence[int] | None, place: str) -> Sample:
    """Exactly the tokens that were sampled, after those of the prompt; no end is invented where the sample was cut.

    Args:
        response_mask: 1 for tokens that are learnt; None: all.
    """
    mask = [*[0] * len(prompt_ids), *(response_mask or [1] * len(response_ids))]
    return Sample(np.array([*prompt_ids, *response_ids], dtype=np.int32), np.array(mask, dtype=bool), place)
