"""Conveyor: RLHF whose stages (rollout, score, train) work at the same time."""

import os

__version__ = "0.1.0"

USAGE_STATISTICS = {
    "RAY_USAGE_STATS_ENABLED": ("0", "1"),
    "VLLM_NO_USAGE_STATS": ("1", "0"),
    "DO_NOT_TRACK": ("1", "0"),
    "HF_HUB_DISABLE_TELEMETRY": ("1", "0"),
}
"""Switches of our dependencies → their values for (off, on)."""

# Off wherever this package runs, unless the user has set a variable otherwise.
for _name, (_off, _) in USAGE_STATISTICS.items():
    os.environ.setdefault(_name, _off)
