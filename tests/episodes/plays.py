"""Rollout functions of the tests. `play` does what the column `do` says, so that one process serves many tests."""

import asyncio
import os
import re
import time


async def play(prompt, generate, do="once", **columns):
    return await globals()["_" + do](prompt, generate, **columns)


async def narrow(prompt, generate, answer, *, digits=3):
    await generate(f"{answer}{digits}")


async def wants_more(prompt, generate, answer, level):
    pass


def plain(prompt, generate):
    pass


async def no_generate(prompt):
    pass


async def by_place(prompt, /, generate):
    pass


class _Callable:
    async def __call__(self, prompt, generate):
        return {"callable": 1}


callable_object = _Callable()


async def _once(prompt, generate, **columns):
    await generate()


async def _three(prompt, generate, **columns):
    turns = [await generate(), await generate("ab"), await generate("cd", max_tokens=2, stop=["x"])]
    return {"texts": [turn.text for turn in turns], "given": [prompt, sorted(columns)], "pair": (1, 2)}


async def _never(prompt, generate, **columns):
    return {"calls": 0}


async def _forever(prompt, generate, **columns):
    while True:
        await generate("a")


async def _pass(prompt, generate, **columns):
    await generate()
    while True:
        pass


async def _backtrack(prompt, generate, **columns):
    """Holds the interpreter, so that no thread of the process can do anything."""
    await generate()
    re.match(r"(a+)+b", "a" * 60)


async def _pass_in_a_task(prompt, generate, **columns):
    await asyncio.gather(_pass(prompt, generate))


async def _sleep(prompt, generate, **columns):
    await generate()
    await asyncio.sleep(60)


async def _stubborn(prompt, generate, **columns):
    """Does not let itself be cancelled."""
    await generate()
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            time.sleep(60)


async def _raises(prompt, generate, **columns):
    await generate()
    raise ValueError("no\nsuch tool")


async def _leaves(prompt, generate, **columns):
    raise SystemExit(3)


async def _dies(prompt, generate, **columns):
    await generate()
    os._exit(7)


async def _forks(prompt, generate, **columns):
    os.fork()
    return {"process": os.getpid()}


async def _misuses(prompt, generate, call, **columns):
    await generate()
    await eval(call, {"generate": generate})


async def _returns(prompt, generate, what, **columns):
    await generate()
    return eval(what, globals())


def nested(levels):
    return [nested(levels - 1)] if levels else 0


class _Wordless(Exception):
    def __str__(self):
        raise ValueError


async def _raises_wordless(prompt, generate, **columns):
    raise _Wordless


class _Odd(dict):
    def __iter__(self):
        raise RuntimeError("no names")


async def _returns_code(prompt, generate, **columns):
    return _Odd()


async def _two_at_once(prompt, generate, **columns):
    await asyncio.gather(generate(), generate())


async def _retries(prompt, generate, **columns):
    try:
        await generate([{"role": "tool", "content": "x"}])
    except ValueError as error:
        await generate("text")
        return {"refused": str(error)}


async def _waits_for(prompt, generate, path, **columns):
    """Between its two turns a file has to appear."""
    await generate(max_tokens=6)
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    await generate("go on", max_tokens=6)
    return {"answer": "waited"}


async def _talks(prompt, generate, **columns):
    for said in (None, "first", [{"role": "tool", "content": "second"}]):
        await generate(said, max_tokens=5)


async def _hangs_if(prompt, generate, hangs, **columns):
    await generate(max_tokens=8)
    while hangs:
        pass
    await generate("x", max_tokens=8)


async def _late(prompt, generate, **columns):
    await asyncio.sleep(2.7)
    await generate("x")
