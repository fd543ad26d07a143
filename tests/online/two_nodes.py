"""A tiny GRPO run over two nodes of a Ray cluster, both on this machine: the engine on one of them, a train rank on each.

A process of its own, because a process has one Ray. Prints the node of each slot as JSON; the run's folder tells the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster

from conveyor.config import OnlineRecipe, parse_recipe
from conveyor.pipeline import loop
from conveyor.workers.placement import Placement

REWARD = "def length(prompts, completions, **columns):\n    return [len(text) / 10 for text in completions]\n"


def main(folder: Path, policy: str) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4)))
    (folder / "rewards.py").write_text(REWARD)
    cluster = Cluster()
    names = []
    for _ in range(2):
        names.append(cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False).node_id)
    recipe = parse_recipe(
        {
            "method": "grpo",
            "output_dir": str(folder / "run"),
            "model": {"path": policy},
            "data": {"path": str(folder / "prompts.jsonl"), "max_prompt_length": 32, "apply_chat_template": False},
            "rewards": [{"name": "length", "function": f"{folder / 'rewards.py'}:length"}],
            "algorithm": {"kl_coef": 0.0},
            "rollout": {"engine": "transformers", "n_samples_per_prompt": 2, "max_response_length": 8, "max_concurrent_requests": 4},
            "train": {"rollout_batch_size": 2, "steps": 2, "learning_rate": 1e-3, "zero_stage": 2},
            "pipeline": {"micro_batch_size": 4, "verify_sync": True},
            "devices": {"rollout": 1, "train": 2},
            "ray": {"address": cluster.address, "placement": {"train": "strict_spread"}},
        }
    )
    assert isinstance(recipe, OnlineRecipe)
    places: dict[str, list[int]] = {}
    run_placed = loop.run_placed

    def noting(recipe: OnlineRecipe, order: object, placement: Placement, **how: object) -> object:
        table = ray.util.placement_group_table(placement._reservation)["bundles_to_node_id"]
        places.update({group: [names.index(table[slot.bundle]) for slot in slots] for group, slots in placement._slots.items()})
        return run_placed(recipe, order, placement, **how)  # type: ignore[arg-type]

    with patch.object(loop, "run_placed", noting):
        loop.run_online(recipe)
    print(json.dumps(places))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
