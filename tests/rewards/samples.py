"""Reward functions for the tests, good and bad."""

import asyncio
import os
import pickle
import struct
import sys
import time


def length(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def exact(completions, answer, prompts):
    return [None if right is None else float(completion == right) for completion, right in zip(completions, answer, strict=True)]


async def slow_length(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [len(completion) for completion in completions]


def seen(prompts, completions, **columns):
    """Refuses, so that the test can read what it was given."""
    raise RuntimeError(repr((prompts, completions, sorted(columns.items()))))


def hangs(prompts, completions, **columns):
    while "hang" in completions:
        pass
    return [1.0] * len(completions)


def sleeps(prompts, completions, **columns):
    if "sleep" in completions:
        time.sleep(60)
    return [1.0] * len(completions)


def raises(prompts, completions, **columns):
    return [1 / (completion != "bad") for completion in completions]


def nan(prompts, completions, **columns):
    return [float("nan") if completion == "bad" else 1.0 for completion in completions]


def huge(prompts, completions, **columns):
    return [1e300 if completion == "bad" else 1.0 for completion in completions]


def leaves(prompts, completions, **columns):
    if "bad" in completions:
        raise SystemExit(3)
    return [1.0] * len(completions)


async def leaves_async(prompts, completions, **columns):
    return leaves(prompts, completions)


def too_few(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)


def texts(prompts, completions, **columns):
    return ["good"] * len(completions)


def no_list(prompts, completions, **columns):
    return {"score": 1.0}


def dies(prompts, completions, **columns):
    os._exit(7)


def no_completions(prompts):
    return []


def by_place(prompts, completions, /, **columns):
    return [1.0] * len(completions)


def swallowed(prompts, *completions):
    return []


def starred(prompts, completions, *answer):
    return [float(len(answer))] * len(completions)


NUMBER = 3


class Judge:
    def __call__(self, prompts, completions, **columns):
        return [2.0] * len(completions)


judge = Judge()


def always_one(prompts, completions, **columns):
    return [1.0]


def one_more(prompts, completions, **columns):
    return [1.0] * (len(completions) + 1)


def talks(prompts, completions, **columns):
    print("judging", *completions)
    return [1.0] * len(completions)


def scaled(prompts, completions, factor):
    return [factor * len(completion) for completion in completions]


def slowly(prompts, completions, **columns):
    time.sleep(0.02 * len(completions))
    return [1.0] * len(completions)


def empties(prompts, completions, **columns):
    scores = [1.0] * len(completions)
    prompts.clear()
    return scores


def empties_and_returns_none(prompts, completions, **columns):
    prompts.clear()
    return []


def forks(prompts, completions, **columns):
    os.fork()
    return [float(len(completion)) for completion in completions]


def scribbles(prompts, completions, **columns):
    """What a completion evaluates to goes to the pipe before the answer."""
    for completion in completions:
        os.write(int(sys.argv[1]), eval(completion, {"framed": lambda data: struct.pack("!i", len(data)) + data, "pickle": pickle}))
    return [1.0] * len(completions)


class _Leaving:
    def __float__(self):
        raise SystemExit(3)


def returns_code(prompts, completions, **columns):
    return [_Leaving()] * len(completions)


class _Wordless(Exception):
    def __str__(self):
        raise ValueError


def raises_wordless(prompts, completions, **columns):
    raise _Wordless


def raises_half_a_pair(prompts, completions, **columns):
    raise ValueError("half \ud800")


def reads_input(prompts, completions, **columns):
    return [float(len(sys.stdin.read()))] * len(completions)
