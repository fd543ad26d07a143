"""Programs, judged by tests that they must pass, in a sandbox (`sandbox.py`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from conveyor.rewards.functions import text_of
from conveyor.rewards.verifiers.sandbox import Sandbox, SandboxError, sweep

FENCED = re.compile(r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


def code(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tests: Sequence[Sequence[str] | str | None],
    seconds: float = 5.0,
    memory_mib: int = 512,
    partial: bool = True,
) -> list[float | None]:
    """The share of the row's tests that the completion's last fenced Python block passes (the whole completion without one).

    A test is a piece of Python run after the program, such as `assert double(2) == 4`; it passes when it raises nothing.
    None where the row has no tests.

    Args:
        tests: a column; of each row, a list of tests or one.
        seconds: for a program with all its tests, of wall clock.
        memory_mib: address space of the program.
        partial: false: 1 where all tests pass, else 0.

    Raises:
        SandboxError: the sandbox cannot be set up here.
    """
    sandbox = Sandbox(seconds, memory_mib)
    return [_score(sandbox, program_of(text_of(completion)), own, partial) for completion, own in zip(completions, tests, strict=True)]


def program_of(text: str) -> str:
    """The last fenced block that is Python, or not said to be anything else; without one the whole text."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def _score(sandbox: Sandbox, program: str, tests: Sequence[str] | str | None, partial: bool) -> float | None:
    own = [tests] if isinstance(tests, str) else list(tests or ())
    if not own:
        return None
    passed = sum(sandbox.run(program, own))
    return passed / len(own) if partial else float(passed == len(own))


def _check(seconds: Any = 5.0, memory_mib: Any = 512, partial: Any = True, **_: Any) -> None:
    """At load, with a program that must pass: a machine whose kernel cannot hold one in must not run any."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds: {seconds!r} is not a finite number above 0")
    if isinstance(memory_mib, bool) or not isinstance(memory_mib, int) or memory_mib < 64:
        raise ValueError(f"memory_mib: {memory_mib!r} is not a whole number of at least 64")
    if not isinstance(partial, bool):
        raise ValueError(f"partial: {partial!r} is neither true nor false")
    sweep()
    try:
        passed = Sandbox(max(seconds, 10.0), memory_mib).run("x = 1", ["assert x == 1"])
    except SandboxError as error:
        raise ValueError(str(error)) from None
    if passed != [True]:
        raise ValueError("a program that does nothing does not pass in the sandbox")


code.check_arguments = _check  # type: ignore[attr-defined]
