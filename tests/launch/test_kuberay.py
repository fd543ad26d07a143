"""The KubeRay files are those that the generator writes, and hold what their names say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from conveyor.config import load_recipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "launch" / "kuberay"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kuberay_make", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_files_are_up_to_date(maker: ModuleType) -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")}
    assert there == maker.files(), "run: python launch/kuberay/make.py"


@pytest.mark.parametrize("total", [1, 8, 32, 128])
def test_a_job_has_its_gpus_and_a_recipe_for_them(total: int) -> None:
    job, cluster = (yaml.safe_load((FOLDER / f"{kind}_{total}gpu.yaml").read_text()) for kind in ("rayjob", "raycluster"))
    assert (job["kind"], cluster["kind"]) == ("RayJob", "RayCluster")
    assert job["apiVersion"] == cluster["apiVersion"] == "ray.io/v1"
    spec = job["spec"]["rayClusterSpec"]
    assert spec == cluster["spec"]
    (group,) = spec["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert group["replicas"] * gpus == total
    assert group["rayStartParams"]["num-gpus"] == str(gpus)
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    for pod in (spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        _checked_pod(pod)
    command, train, recipe, *resume = job["spec"]["entrypoint"].split()
    assert [command, train, *resume] == ["conveyor", "train", "--checkpoint.resume", "true"]
    devices = load_recipe(ROOT / recipe).devices
    assert devices is not None
    assert sum(devices.values()) == total


def _checked_pod(pod: dict[str, Any]) -> None:
    """What is mounted is there, and what is shared between pods is one claim."""
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {"shared": "/shared", "shm": "/dev/shm"}
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == "conveyor-shared"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert container["workingDir"].startswith("/shared/")
