"""Samples for the tests of rewards."""

from __future__ import annotations

from typing import Any

import torch

from conveyor.types import Prompt, Rollout


def rollout(
    text: str, row: int = 0, messages: Any = None, *, told: Any = None, failure: str | None = None, version: int = 0, **columns: Any
) -> Rollout:
    """`told`: columns of the function that played the sample's turns."""
    ids = torch.tensor([ord(c) for c in text] or [2])
    prompt = Prompt(index=row, row=row, token_ids=(1, 5), text="2+2=", messages=messages, columns=columns)
    versions = torch.full((len(ids),), version, dtype=torch.int32)
    return Rollout(prompt, 0, ids, torch.zeros(len(ids)), versions, "stop", text, columns=told or {}, failure=failure)
