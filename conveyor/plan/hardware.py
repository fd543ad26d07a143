"""What GPUs can do, and how much of that programs get."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.config import UserError

TRAIN_EFFICIENCY = 0.40
"""Share of the peak that forward and backward reach: 0.46 in PaLM (Chowdhery et al. 2022, table 3); less with small micro-batches."""
FORWARD_EFFICIENCY = 0.50
"""Share of the peak in a forward pass alone, and in prefill: no gradients are stored, so matrices are larger at a time."""
BANDWIDTH_EFFICIENCY = 0.75
"""Share of the memory bandwidth that decoding and optimizer kernels reach; STREAM-like kernels reach 0.8–0.9."""
NETWORK_EFFICIENCY = 0.75
"""Share of a link's rate that large NCCL collectives reach."""
OVERLAP = 0.7
"""Share of the shorter of arithmetic and communication that hides behind the longer, where a layer is fetched while another computes."""
ITERATION_SECONDS = 3e-3
"""Scheduling, launch and sampling of one decode iteration, whatever its size."""
SAMPLE_SECONDS = 1e-5
"""Bookkeeping of one sample in one iteration."""
COLLECTIVE_SECONDS = 12e-6
"""One small all-reduce between GPUs of a node."""
TASK_SECONDS = 5e-3
"""A task's fixed cost: launches, padding, moving a batch to the GPU."""
LATENCY_SECONDS = 2e-3
"""From the end of one task, over the driver, to the start of the next."""
HOST_BANDWIDTH = 20e9
"""Bytes/s of host memory for one GPU's share of an offloaded optimizer: some 160 GB/s for the 8 GPUs of a node."""
RESERVED_BYTES = 3e9
"""Of a GPU's memory: CUDA context, communication buffers, fragmentation."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One kind of accelerator in nodes of eight, by its maker's data sheet."""

    flops: float
    """Peak of dense bfloat16 multiplications with fp32 sums, FLOP/s."""
    bandwidth: float
    """Of its memory, bytes/s."""
    memory: float
    """Bytes; the round number it is sold by, which is somewhat less than it has."""
    node_link: float
    """To GPUs of the same node, bytes/s one way."""
    cluster_link: float
    """To GPUs of other nodes, bytes/s one way, its own share of the node's network."""
    host_link: float
    """To host memory, bytes/s one way."""
    node_size: int = 8

    def link(self, count: int) -> float:
        """Effective bytes/s at which each of `count` GPUs takes part in a collective. Between nodes each GPU's network card carries
        a part, which the links inside the nodes pass on."""
        slowest = self.node_link if count <= self.node_size else min(self.node_link, self.node_size * self.cluster_link)
        return NETWORK_EFFICIENCY * slowest

    def broadcast_link(self, count: int) -> float:
        """Effective bytes/s from one GPU to `count` others: between nodes its own network card has to carry it all."""
        return NETWORK_EFFICIENCY * (self.node_link if count < self.node_size else min(self.node_link, self.cluster_link))


GPUS = {
    "a100": GPU(312e12, 2.04e12, 80e9, 300e9, 25e9, 25e9),  # SXM 80 GB, 8 × 200 Gb/s
    "h100": GPU(989e12, 3.35e12, 80e9, 450e9, 50e9, 50e9),  # SXM, 8 × 400 Gb/s
    "h200": GPU(989e12, 4.8e12, 141e9, 450e9, 50e9, 50e9),
    "b200": GPU(2250e12, 8.0e12, 180e9, 900e9, 50e9, 50e9),
    "l40s": GPU(362e12, 0.864e12, 48e9, 32e9, 12.5e9, 25e9),  # PCIe, no NVLink; 4 × 200 Gb/s
}


def gpu(name: str) -> GPU:
    """Raises UserError for a name not known."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu: {name!r} is not known; one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
