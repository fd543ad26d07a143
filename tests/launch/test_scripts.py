"""The launch scripts with commands that only write down how they were called: addresses, GPUs, order, exit status, signals."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))

RECORD = 'printf "%s\\n" "$(basename "$0") $*" >>"$CALLS"\n'
BLOCK = """
  trap 'echo "ended $(basename "$0") $*" >>"$CALLS"; exit 143' TERM
  while true; do sleep 0.05; done
"""
COMMANDS = {
    # A head answers once it runs.
    "ray": f"""
if [[ $* == *--block* ]]; then {BLOCK} fi
case "$1 ${{2:-}}" in
  health-check*) grep --quiet "^ray start --head" "$CALLS" && exit "${{HEALTH:-0}}" ;;
  "job submit") exit "${{JOB_STATUS:-0}}" ;;
esac
""",
    # Runs its command, as on another node.
    "srun": 'while [[ ${1:-} == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": 'if [[ $1 == show ]]; then printf "%s\\n" $NODES; fi\n',
    "hostname": 'echo "${ADDRESSES:-fe80::1 10.0.0.7 192.168.0.1}"\n',
    # wait_for_gpus.py ADDRESS GPUS SECONDS
    "python": """
until (($(grep --count "^ray start" "$CALLS") * SLURM_GPUS_ON_NODE == $3)); do sleep 0.02; done
exit "${WAITED:-0}"
""",
    "conveyor": f"""
if [[ ${{CONVEYOR:-}} == block ]]; then {BLOCK} fi
if [[ -e $STATUSES ]]; then
  status=$(head -1 "$STATUSES")
  sed -i 1d "$STATUSES"
  exit "$status"
fi
""",
}
"""Name → what it does after it has written down how it was called."""


class Bench:
    """A folder of commands in the place of the real ones."""

    def __init__(self, folder: Path) -> None:
        self.calls_file = folder / "calls"
        commands = folder / "bin"
        commands.mkdir()
        for name, body in COMMANDS.items():
            path = commands / name
            path.write_text(f"#!/usr/bin/env bash\n{RECORD}{body}")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(self.calls_file), "STATUSES": str(folder / "statuses"),
            "SLURM_SUBMIT_DIR": str(LAUNCH.parent), "SLURM_JOB_ID": "4321", "SLURM_JOB_NODELIST": "gpu[1-4]",
            "NODES": "gpu1 gpu2 gpu3 gpu4",
            "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "RAY_ADDRESS": "10.9.9.9:1",
        }  # fmt: skip
        self.statuses = folder / "statuses"

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(LAUNCH / script), *arguments], env=self.environment | environment, cwd=LAUNCH.parent,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """(exit status, standard error)"""
        process = self.start(script, *arguments, **environment)
        _, errors = process.communicate(timeout=30)
        return process.returncode, errors

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def wait_for(self, call: str) -> None:
        deadline = time.monotonic() + 20
        while not any(line.startswith(call) for line in self.calls):
            assert time.monotonic() < deadline, f"no {call} in {self.calls}"
            time.sleep(0.02)

    def place(self, beginning: str) -> int:
        """Of the first call that begins so."""
        return next(number for number, call in enumerate(self.calls) if call.startswith(beginning))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert script.stat().st_mode & stat.S_IXUSR


# ── Slurm ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (4, 8), (16, 8)])
def test_slurm_starts_the_head_then_workers_then_the_job(bench: Bench, nodes: int, gpus: int) -> None:
    names = [f"gpu{number}" for number in range(nodes)]
    status, errors = bench.run("slurm.sh", "recipe.yaml", "--train.steps", "3", NODES=" ".join(names), SLURM_GPUS_ON_NODE=str(gpus))
    assert (status, errors) == (0, "")
    steps = [call for call in bench.calls if call.startswith("srun")]
    assert [call.split("--nodelist=")[1].split()[0] for call in sorted(steps)] == sorted(names)
    assert all(f"--num-gpus={gpus}" in call and "--block" in call for call in steps)
    # 20000 + the job's number; the first address that is no IPv6 one.
    address = "10.0.0.7:24321"
    assert "--head --node-ip-address=10.0.0.7 --port=24321" in bench.calls[bench.place("srun")]
    assert sum(f"ray start --address={address}" in call for call in steps) == nodes - 1
    assert f"python {LAUNCH}/wait_for_gpus.py {address} {nodes * gpus} " in bench.calls[bench.place("python")]
    assert bench.calls[bench.place("conveyor")] == f"conveyor train recipe.yaml --train.steps 3 --ray.address {address}"
    head, wait, job = (bench.place(word) for word in ("ray start --head", "python", "conveyor"))
    workers = [number for number, call in enumerate(bench.calls) if call.startswith("srun") and "--head" not in call]
    assert max(head, bench.place("ray health-check")) < min([*workers, wait])
    assert wait < job
    # Ray's processes end with the job.
    assert sum(call.startswith("ended ray start") for call in bench.calls) == nodes


def test_slurm_ends_as_the_job_ends(bench: Bench) -> None:
    bench.statuses.write_text("7\n")
    assert bench.run("slurm.sh", "recipe.yaml")[0] == 7
    assert sum(call.startswith("ended ray start") for call in bench.calls) == 4


def test_slurm_resumes_a_job_that_was_queued_again(bench: Bench) -> None:
    assert bench.run("slurm.sh", "recipe.yaml", SLURM_RESTART_COUNT="1")[0] == 0
    assert bench.calls[bench.place("conveyor")].endswith("--ray.address 10.0.0.7:24321 --checkpoint.resume true")


@pytest.mark.parametrize("again", ["0", "1"])
def test_a_job_that_is_preempted_ends_its_driver_and_ray(bench: Bench, again: str) -> None:
    process = bench.start("slurm.sh", "recipe.yaml", CONVEYOR="block", REQUEUE_AT_LIMIT=again)
    bench.wait_for("conveyor train")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert sum(call.startswith("ended conveyor train") for call in bench.calls) == 1
    assert sum(call.startswith("ended ray start") for call in bench.calls) == 4
    assert ("scontrol requeue 4321" in bench.calls) == (again == "1")


def test_a_head_that_does_not_answer(bench: Bench) -> None:
    status, errors = bench.run("slurm.sh", "recipe.yaml", HEALTH="1", START_SECONDS="0")
    assert status == 1
    assert "Ray's head on gpu1 does not answer at 10.0.0.7:24321" in errors
    assert not any(call.startswith("conveyor") for call in bench.calls)


def test_nodes_that_do_not_come(bench: Bench) -> None:
    assert bench.run("slurm.sh", "recipe.yaml", WAITED="1")[0] == 1
    assert not any(call.startswith("conveyor") for call in bench.calls)


# ── plain Ray ────────────────────────────────────────────────────────────────────────────────────


def test_a_head_a_worker_and_their_end(bench: Bench) -> None:
    process = bench.start("ray_node.sh", "head", GPUS="8")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "launch/ray_node.sh worker 10.0.0.7:6379" in out
    assert bench.calls[-1] == "ray start --head --node-ip-address=10.0.0.7 --port=6379 --dashboard-host=127.0.0.1 --num-gpus=8"
    assert bench.run("ray_node.sh", "worker", "10.0.0.7:6379", OBJECT_STORE_GIB="2")[0] == 0
    assert bench.calls[-1] == f"ray start --address=10.0.0.7:6379 --object-store-memory={2 * 2**30}"
    assert bench.run("ray_node.sh", "stop")[0] == 0
    assert bench.calls[-1] == "ray stop"
    status, errors = bench.run("ray_node.sh", "head", ADDRESSES="fe80::1")
    assert (status, "HEAD_IP" in errors) == (1, True)


@pytest.mark.parametrize("arguments", [[], ["worker"], ["worker", "10.0.0.7"], ["head", "more"], ["tail"]])
def test_a_node_is_head_or_worker(bench: Bench, arguments: list[str]) -> None:
    status, errors = bench.run("ray_node.sh", *arguments)
    assert (status, errors.count("\n")) == (2, 1)
    assert not bench.calls


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_is_submitted_and_its_end_is_the_scripts(bench: Bench, status: int) -> None:
    assert bench.run("ray_submit.sh", "recipe.yaml", "--train.steps", "3", JOB_STATUS=str(status))[0] == status
    (call,) = (call for call in bench.calls if call.startswith("ray job submit"))
    assert call.startswith("ray job submit --address http://127.0.0.1:8265 --submission-id conveyor-")
    assert call.endswith(f" -- env -C {LAUNCH.parent} conveyor train recipe.yaml --train.steps 3")


def test_words_that_a_shell_would_change_are_refused(bench: Bench) -> None:
    status, errors = bench.run("ray_submit.sh", "recipe.yaml", "--rewards", '[{"name": "x"}]')
    assert status == 2
    assert "set it in the recipe" in errors
    assert not bench.calls


# ── one node ─────────────────────────────────────────────────────────────────────────────────────


def test_one_node_tries_again_from_the_newest_checkpoint(bench: Bench) -> None:
    bench.statuses.write_text("1\n1\n0\n")
    status, _ = bench.run("single_node.sh", "recipe.yaml", "--seed", "2", ATTEMPTS="3")
    assert status == 0
    resumed = "conveyor train recipe.yaml --seed 2 --checkpoint.resume true"
    assert [call for call in bench.calls if call.startswith("conveyor")] == ["conveyor train recipe.yaml --seed 2", resumed, resumed]


@pytest.mark.parametrize(("ends", "attempts"), [("2", "3"), ("1", "1")])
def test_bad_input_is_not_tried_again(bench: Bench, ends: str, attempts: str) -> None:
    bench.statuses.write_text(f"{ends}\n0\n")
    assert bench.run("single_node.sh", "recipe.yaml", ATTEMPTS=attempts)[0] == int(ends)
    assert sum(call.startswith("conveyor") for call in bench.calls) == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_one_node_ends_its_run_when_it_is_asked_to(bench: Bench, sent: signal.Signals) -> None:
    process = bench.start("single_node.sh", "recipe.yaml", CONVEYOR="block", ATTEMPTS="5")
    bench.wait_for("conveyor train")
    process.send_signal(sent)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert sum(call.startswith("ended conveyor") for call in bench.calls) == 1
    assert sum(call.startswith("conveyor") for call in bench.calls) == 1


@pytest.mark.parametrize("script", ["slurm.sh", "ray_submit.sh", "single_node.sh"])
def test_a_script_without_a_recipe_says_how_it_is_used(bench: Bench, script: str) -> None:
    status, errors = bench.run(script)
    assert status == 2
    assert errors.startswith("usage: ")
