"""Conveyor: RLHF whose stages (rollout, score, train) work at the same time."""

import os

__version__ = "0.1.0"

# No dependency sends usage statistics unless the user has set these variables otherwise.
for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}.items():
    os.environ.setdefault(_name, _value)
