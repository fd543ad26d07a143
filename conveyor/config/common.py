"""What recipes of every method have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from conveyor.config import sections


class Common(sections.Section):
    seed: sections.Whole = Field(0, description="of everything random: order, sampling, initial heads")
    output_dir: str = Field(description="the run's folder")
    overwrite: sections.Flag = Field(False, description="replace a run that output_dir already holds")
    model: sections.Model
    data: sections.Data
    train: sections.Train = sections.Train()
    lora: sections.Lora | None = Field(
        None,
        description="train low-rank adapters of the linear layers, of the critic too; model/ has them merged, adapter/ alone "
        "(loops: anew in each round, and merged at its end)",
    )
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    ray: sections.Ray = sections.Ray()
    devices: dict[str, Annotated[sections.Number, Field(ge=0.01)]] | None = Field(
        None, description="device groups: name → accelerators (CPU cores where there are none); default: what is there"
    )
    telemetry: sections.Flag = Field(False, description="let Ray, vLLM and the hub send usage statistics")
