"""Programs of a model: judged by tests, held in by the sandbox."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conveyor.rewards.verifiers.programs import code, program_of
from conveyor.rewards.verifiers.sandbox import Sandbox, SandboxError, sweep


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Sandbox:
    made = Sandbox(seconds=5.0, memory_mib=256)
    try:
        made.run("", ["pass"])
    except SandboxError as error:
        pytest.skip(str(error))
    return made


def refused(attempt: str, error: str = "PermissionError") -> str:
    """A test that passes where the attempt raises the error."""
    lines = "\n".join(f"    {line}" for line in attempt.splitlines())
    return f"try:\n{lines}\nexcept {error}: pass\nelse: raise AssertionError"


def test_programs_are_taken_from_the_last_fenced_block():
    assert program_of("```python\na = 1\n```\nor\n```py\na = 2\n```\nand\n```json\n{}\n```") == "a = 2\n"
    assert program_of("a = 1") == "a = 1"


def test_the_score_is_the_share_of_tests_passed():
    text = "Here:\n```python\ndef double(x):\n    return 2 * x\n```"
    tests = ["assert double(2) == 4", "assert double(2) == 5", "assert double('a') == 'aa'", "double()"]
    completions = [text, [{"role": "assistant", "content": text}], "def double(x", text, text]
    given = [tests, tests[0], tests, None, []]
    assert code(["p"] * 5, completions, given) == [0.5, 1.0, 0.0, None, None]
    assert code(["p"], [text], [tests], partial=False) == [0.0]


def test_ordinary_programs_work(sandbox):
    program = """
import asyncio, collections, datetime, decimal, functools, hashlib, heapq, itertools, json, math, random, re, sys, threading
found = []
thread = threading.Thread(target=found.append, args=(1,))
thread.start()
thread.join()
sys.setrecursionlimit(5000)
if __name__ == "__main__":
    sys.exit(0)
"""
    tests = [
        "assert found == [1]",
        "async def wait(): await asyncio.sleep(0)\nasyncio.run(wait())",
        "open('notes', 'w').write('own folder')\nassert open('notes').read() == 'own folder'",
        "import os\nos.remove('notes')",
        "import socket\none, other = socket.socketpair()\none.sendall(b'x')\nassert other.recv(1) == b'x'",
        "import fcntl\nassert fcntl.fcntl(0, fcntl.F_GETFL) == 0",
    ]
    assert sandbox.run(program, tests) == [True] * 6


REFUSED = [
    "import os; os.fork()",
    "import subprocess; subprocess.run(['/bin/true'])",
    "import os; os.execv('/bin/true', ['true'])",
    "import socket; socket.socket()",
    "import os; os.kill(os.getppid(), 9)",
    "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "open('/proc/self/environ').read()",
    "open('/etc/passwd').read()",
    "import os; os.listdir('/')",
    "open('/tmp/left-behind', 'w')",
    "import os; os.mkdir('/tmp/left-behind')",
    "import os; os.chmod('.', 0)",
    "import os; os.utime('.')",
    "import os; os.truncate('/etc/hostname', 0)",
    "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "import socket; socket.socketpair(type=socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)",
    "import socket; socket.socketpair(30)",
    "import socket; socket.socketpair()[0].connect('/tmp/listens')",
    "import socket; socket.socketpair()[0].bind('mine')",
    "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "import fcntl, signal; fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)",
    "import fcntl, struct; fcntl.fcntl(0, 15, struct.pack('ii', 1, 1))",
    "import fcntl, os, struct; fcntl.ioctl(0, 0x8901, struct.pack('i', os.getppid()))",
    "import fcntl, os, struct; fcntl.ioctl(0, 0x8902, struct.pack('i', os.getppid()))",
    "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "import ctypes\nif ctypes.CDLL(None, use_errno=True).prctl(1, 0) and ctypes.get_errno() == 1: raise PermissionError",
    "import ctypes\nif ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and ctypes.get_errno() == 1: raise PermissionError",
]


def test_what_is_not_computing_is_refused(sandbox):
    passed = sandbox.run("", [refused(attempt) for attempt in REFUSED])
    assert [attempt for attempt, one in zip(REFUSED, passed, strict=True) if not one] == []
    assert not Path("/tmp/left-behind").exists()


def test_the_tests_own_folder_cannot_be_written(sandbox, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    attempts = [f"open({str(kept)!r}, 'a')", f"import os; os.remove({str(kept)!r})", f"import os; os.rename({str(kept)!r}, 'mine')"]
    assert sandbox.run("", [refused(attempt) for attempt in attempts]) == [True] * 3
    assert kept.read_text() == "kept"


def test_the_environment_is_empty(sandbox, monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "s3cret")
    assert sandbox.run("import os", ["assert set(os.environ) <= {'LC_CTYPE'}"]) == [True]


def test_memory_and_files_have_limits(sandbox):
    assert sandbox.run("", [refused("'x' * 10**9", "MemoryError"), refused("open('big', 'w').write('x' * 2**22)", "OSError")]) == [
        True,
        True,
    ]


def test_a_fork_bomb_makes_no_process(sandbox):
    bomb = "import os\nmade = 0\nfor _ in range(1000):\n    try: made += os.fork() > 0\n    except OSError: pass"
    assert sandbox.run(bomb, ["assert made == 0"]) == [True]


@pytest.mark.parametrize("ending", ["import os; os._exit(0)", "import sys; sys.exit(1)", "raise ValueError", "1 +"])
def test_a_program_that_ends_early_passes_nothing(sandbox, ending):
    assert sandbox.run(ending, ["pass", "pass"]) == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "endless",
    ["while True: pass", "import time; time.sleep(60)", "while True: print('x' * 10**6)", "while True: open('f%d' % id(object()), 'w')"],
)
def test_what_does_not_end_is_ended(endless):
    start = time.monotonic()
    assert Sandbox(0.3, 256).run("", ["pass", endless, "pass"]) == [True, False, False]
    assert time.monotonic() - start < 3


def test_marks_are_not_to_be_guessed_and_a_flood_of_them_ends():
    flood = """
import os
for descriptor in range(3, 1024):
    try:
        while True: os.write(descriptor, b"passed\\n" * 1000)
    except OSError: pass
"""
    start = time.monotonic()
    assert Sandbox(30.0, 256).run(flood, ["pass"]) == [False]
    assert time.monotonic() - start < 20


def test_where_the_walls_cannot_be_put_up_nothing_is_run(sandbox, monkeypatch, tmp_path):
    broken = tmp_path / "confined.py"
    from conveyor.rewards.verifiers import sandbox as module

    broken.write_text(
        module.CONFINED.read_text().replace("abi = LIBC.syscall(create, None, ctypes.c_size_t(0), ctypes.c_uint32(1))", "abi = 2")
    )
    monkeypatch.setattr(module, "CONFINED", broken)
    with pytest.raises(SandboxError, match="the sandbox for programs cannot be set up: the kernel has no Landlock"):
        sandbox.run("", ["pass"])


@pytest.mark.slow
def test_the_program_ends_with_its_parent():
    script = "from conveyor.rewards.verifiers.sandbox import Sandbox\nSandbox(60, 256).run('import time; time.sleep(61.5)', ['pass'])"
    caller = subprocess.Popen([sys.executable, "-c", script])
    try:
        child = _child_of(caller.pid)
    finally:
        caller.kill()
        caller.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(1200): os.mkdir('a'); os.chdir('a')",
        "import os\nos.makedirs('a/b/c'); os.mkdir('a/closed', 0)\nopen('a/b/file', 'w').close(); os.symlink('/etc', 'a/b/link')",
    ],
)
def test_whatever_a_program_makes_is_deleted_and_says_nothing_of_it(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Sandbox(30.0, 256).run(program, ["pass"]) == [True]
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_deleted_says_nothing_of_the_program(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "rmdir", lambda path: os.unlink(path))  # fails
    assert sandbox.run("", ["pass"]) == [True]


def test_months_are_a_time_limit():
    assert Sandbox(1e7, 256).run("", ["pass"]) == [True]


def test_folders_of_callers_that_were_killed_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("left", "alive", "young"):
        (tmp_path / f"conveyor-sandbox-{name}").mkdir()
    for name in ("left", "alive"):
        os.utime(tmp_path / f"conveyor-sandbox-{name}", (1.0, 1.0))
    lock = os.open(tmp_path / "conveyor-sandbox-alive", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sweep()
    os.close(lock)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["conveyor-sandbox-alive", "conveyor-sandbox-young"]


def _child_of(pid: int) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.02)
    raise AssertionError(f"{pid} started nothing; this process is {os.getpid()}")
