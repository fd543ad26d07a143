"""Installs that trainer and engine carry out together: the engine receives while the trainer's ranks send.

    Publish ─▶ announced ─▶ InstallEngine, InstallEngine ─▶ one pass over the weights serves all that came together
                        └─▶ Update, before an engine has asked ─▶ into the object store, where the engine finds them later

The trainer's own weights are what is sent, and an update changes them. Ranks carry out calls in the order of sending, so what was asked
for before the update is sent before it; what was not is put into the object store first.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from conveyor.config import OnlineRecipe, UserError
from conveyor.workers.reports import InstallReport, Publication
from conveyor.workers.weight_stream import Transport


class WeightStreams:
    """Between the ranks that train the actor and all engines."""

    def __init__(self, trainers: list[Any], engines: list[Any]) -> None:
        self._trainers, self._engines = trainers, engines
        self._announced: Publication | None = None
        self._served: set[int] = set()
        """Engines that have asked for what was announced."""
        self._waiting: list[int] = []
        self._sending: dict[int, list[Any]] = {}
        """Engine → the ranks' calls that send to it."""

    async def open(self, transport: Transport, processes: int) -> None:
        """Rank r meets engines r, r + ranks, …, one after the other. `processes`: of an engine."""

        async def meet(engine: int) -> None:
            rank = self._trainers[engine % len(self._trainers)]
            address, port = await rank.stream_door.remote()
            await asyncio.gather(
                rank.open_stream.remote(transport, engine, address, port, processes + 1),
                self._engines[engine].open_stream.remote(transport, address, port, processes + 1),
            )

        async def serve(rank: int) -> None:
            for engine in range(rank, len(self._engines), len(self._trainers)):
                await meet(engine)

        await asyncio.gather(*map(serve, range(len(self._trainers))))

    def announce(self, publication: Publication) -> None:
        self._announced, self._served = publication, set()

    async def install(self, engine: int, publication: Publication) -> InstallReport:
        """Have an engine take what was announced."""
        assert publication is self._announced, "weights were asked for that are not announced any more"
        self._served.add(engine)
        self._waiting.append(engine)
        receiving = self._engines[engine].install.remote(publication)
        await asyncio.sleep(0)  # those that are asked at the same moment go together
        self._begin_pass()
        report, *_ = await asyncio.gather(receiving, *self._sending.pop(engine))
        assert isinstance(report, InstallReport)
        return report

    def late(self) -> Publication | None:
        """Before the weights change: what is announced, if not every engine has asked for it. What was asked for is on its way to the
        ranks when this returns; nothing else can be asked for."""
        self._begin_pass()
        announced, self._announced = self._announced, None
        return announced if len(self._served) < len(self._engines) else None

    def _begin_pass(self) -> None:
        if self._waiting:
            assert self._announced is not None
            engines, self._waiting = tuple(self._waiting), []
            calls = [rank.send_weights.remote(self._announced.version, engines) for rank in self._trainers]
            self._sending |= dict.fromkeys(engines, calls)


def transport_of(recipe: OnlineRecipe, devices: Literal["GPU", "CPU"]) -> Transport | None:
    """How engines get weights from the trainer itself; None: through the object store, as adapters do.

    Raises:
        UserError: NCCL is asked for where there are no GPUs.
    """
    given = recipe.pipeline.weight_transfer
    if given == "nccl" and devices == "CPU":
        raise UserError(
            "pipeline.weight_transfer: nccl moves weights between GPUs, and the devices are CPU cores; use gloo or object_store"
        )
    if given is None:
        whole = recipe.rollout.engine == "vllm" and not recipe.adapter_travels
        apart = whole and recipe.role_group("actor") != recipe.role_group("rollout")
        return "nccl" if devices == "GPU" and apart else None
    return None if given == "object_store" else given


def open_streams(recipe: OnlineRecipe, transport: Transport, trainers: list[Any], engines: list[Any]) -> WeightStreams:
    """Have ranks and engines, which are ready, meet. Waits for them."""
    streams = WeightStreams(trainers, engines)
    asyncio.run(streams.open(transport, recipe.rollout.tensor_parallel_size))
    return streams
