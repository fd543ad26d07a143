"""Writes the KubeRay files of every size beside this one: `python launch/kuberay/make.py`. A test says when they are out of date.

A RayCluster stays and takes jobs; a RayJob brings its cluster and removes it when it has ended. Both have a head without GPUs, on which
`conveyor train` runs, and as many workers as a size has nodes; everything is under /shared, a volume that all pods see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
IMAGE = "conveyor-gpu:0.1.0"
RAY = "2.60.0"
SIZES = {
    1: (1, 1, "llama3_8b_grpo_lora_1gpu"),
    8: (1, 8, "llama3_8b_ppo_8gpu"),
    32: (4, 8, "llama3_70b_ppo_32gpu"),
    128: (16, 8, "llama3_70b_ppo_128gpu"),
}
"""GPUs → (nodes, GPUs of each, recipe)."""
HOST_GIB_PER_GPU = 192
"""Memory of a pod, for each of its GPUs: optimizers that are offloaded, and Ray's object store."""


def cluster_spec(nodes: int, gpus: int) -> dict[str, Any]:
    worker = _pod(cores=8 * gpus, gib=HOST_GIB_PER_GPU * gpus, shared_memory_gib=24 * gpus, gpus=gpus)
    return {
        "rayVersion": RAY,
        "headGroupSpec": {
            "rayStartParams": {"num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod(cores=8, gib=64, shared_memory_gib=16),
        },
        "workerGroupSpecs": [
            {
                "groupName": "gpu",
                "replicas": nodes,
                "minReplicas": nodes,
                "maxReplicas": nodes,
                "rayStartParams": {"num-gpus": str(gpus)},
                "template": worker,
            }
        ],
    }


def _pod(cores: int, gib: int, shared_memory_gib: int, gpus: int = 0) -> dict[str, Any]:
    size: dict[str, Any] = {"cpu": cores, "memory": f"{gib}Gi"} | ({"nvidia.com/gpu": gpus} if gpus else {})
    container = {
        "name": "ray-worker" if gpus else "ray-head",
        "image": IMAGE,
        "workingDir": "/shared/conveyor",
        "env": [{"name": "HF_HOME", "value": "/shared/huggingface"}, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "resources": {"limits": size, "requests": dict(size)},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": "conveyor-shared"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_memory_gib}Gi"}},
    ]
    return {"spec": {"containers": [container], "volumes": volumes}}


def documents(total: int) -> dict[str, dict[str, Any]]:
    """File name → what is in it, for a number of GPUs."""
    nodes, gpus, recipe = SIZES[total]
    ray_cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": f"conveyor-{total}gpu"},
        "spec": cluster_spec(nodes, gpus),
    }
    # A job that is tried again has a new cluster and the same folder, so it resumes; the first time there is nothing to resume from.
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": f"conveyor-{total}gpu"},
        "spec": {
            "entrypoint": f"conveyor train recipes/{recipe}.yaml --checkpoint.resume true",
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": 3,
            "rayClusterSpec": cluster_spec(nodes, gpus),
        },
    }
    return {f"raycluster_{total}gpu.yaml": ray_cluster, f"rayjob_{total}gpu.yaml": ray_job}


def text(document: dict[str, Any]) -> str:
    return "# Made by launch/kuberay/make.py; docs/clusters.md says what it needs.\n" + yaml.safe_dump(document, sort_keys=False, width=130)


def files() -> dict[str, str]:
    """File name → its text, of all sizes."""
    return {name: text(document) for total in SIZES for name, document in documents(total).items()}


if __name__ == "__main__":
    for name, written in files().items():
        (FOLDER / name).write_text(written, encoding="utf-8")
