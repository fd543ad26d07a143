"""A game of several turns: reasoning-gym's countdown, with a second and a third try. Rows need `numbers` and `target` columns.

    python examples/multi_turn/game.py 500 > countdown.jsonl

    rollout:
      multi_turn: {function: "examples/multi_turn/game.py:rollout"}
    rewards:
      - {name: solved, function: "examples/multi_turn/game.py:reward"}

The model proposes an expression, the environment says what is wrong with it, the model tries again. The last try is scored.
"""

import json
import re
import sys

from calculator import arithmetic, shown
from reasoning_gym import create_dataset, get_score_answer_fn

TRIES = 3
score_answer = get_score_answer_fn("countdown")


async def rollout(prompt, generate, numbers, target):
    """Up to `TRIES` guesses, with what is wrong as the user's words between them."""
    turn = await generate()
    for tries in range(1, TRIES + 1):
        guess = find_expression(turn.text)
        wrong = feedback(guess, numbers, target)
        if wrong is None or tries == TRIES:
            return {"guess": guess, "tries": tries}
        turn = await generate([{"role": "user", "content": wrong}])


def find_expression(text):
    """The last line that is arithmetic and nothing else, up to a `=`; None without one."""
    for line in reversed(text.splitlines()):
        expression = line.partition("=")[0].strip()
        if re.fullmatch(r"[\d+\-*/() ]+", expression) and re.search(r"\d", expression):
            return expression
    return None


def feedback(guess, numbers, target):
    """What is wrong with a guess, None: nothing."""
    if guess is None:
        return "I see no expression. Write it alone on the last line."
    try:
        result = arithmetic(guess)
    except ValueError as error:
        return f"{guess} cannot be calculated: {error}. Try again."
    if sorted(map(int, re.findall(r"\d+", guess))) != sorted(numbers):
        return f"Use each of {', '.join(map(str, numbers))} once. Try again."
    return None if result == target else f"{guess} is {shown(result)}, not {target}. Try again."


def reward(prompts, completions, numbers, target, guess=None, **columns):
    """reasoning-gym's score of the last guess: 1 where it is right, at most 0.05 elsewhere.

    `guess` comes from the game, not from the dataset, and is None where a limit has cut the game.
    """
    guesses = guess or [None] * len(completions)
    return [score(*sample) for sample in zip(guesses, numbers, target, strict=True)]


def score(guess, numbers, target):
    """The scorer has sympy evaluate what it is given, which runs code, so it is given nothing but arithmetic."""
    try:
        if guess is not None:
            arithmetic(guess)
    except ValueError:
        guess = None
    return score_answer(guess, {"metadata": {"numbers": numbers, "target": target}})


if __name__ == "__main__":
    for entry in create_dataset("countdown", size=int(sys.argv[1]), seed=0, min_numbers=3, max_numbers=4):
        print(json.dumps({"prompt": entry["question"], **{name: entry["metadata"][name] for name in ("numbers", "target")}}))
