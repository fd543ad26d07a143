"""A calculator as a tool: `<calc>12 * 7</calc>` is followed by its value, and the model goes on. Rows need an `answer` column.

python examples/multi_turn/calculator.py 500 > sums.jsonl

rollout:
  multi_turn: {function: "examples/multi_turn/calculator.py:rollout"}
rewards:
  - {name: right, function: "examples/multi_turn/calculator.py:reward"}
"""

import ast
import json
import operator
import random
import re
import sys
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}
LONGEST = 100


async def rollout(prompt, generate):
    """Answers every call of the calculator; the turn that calls it no more is the last."""
    calls = 0
    turn = await generate(stop=["</calc>"])
    while (call := find_call(turn.text)) is not None:
        calls += 1
        turn = await generate(f" = {calculator(call)}\n", stop=["</calc>"])
    return {"calls": calls}


def find_call(text):
    """`so <calc>2+3</calc>` → `2+3`; None where the text does not end in a call."""
    found = re.search(r"<calc>([^<]*)</calc>\s*$", text)
    return found and found.group(1)


def calculator(expression):
    """`2 * (3 + 1)` → `8`; what cannot be calculated is said."""
    try:
        return shown(arithmetic(expression))
    except ValueError as error:
        return f"error: {error}"


def arithmetic(expression):
    """The exact value of numbers, + - * / and brackets. Nothing else is ever evaluated.

    Raises:
        ValueError: it is anything else, longer than `LONGEST`, or has no value.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"more than {LONGEST} characters")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic") from None


def value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if node.value > 1e30:
            raise ValueError("a number is too large")
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](value(node.operand))
    raise ValueError("only numbers, + - * / and brackets")


def shown(number):
    """A whole number with all its digits, others with ten; ValueError where it is too large for those."""
    try:
        return str(number) if number.denominator == 1 else f"{float(number):.10g}"
    except OverflowError:
        raise ValueError("a number is too large") from None


def reward(prompts, completions, answer, **columns):
    """1 where the number after the last `answer:` is the row's, else 0."""
    return [float(given_answer(text_of(completion)) == float(right)) for completion, right in zip(completions, answer, strict=True)]


def given_answer(text):
    """`… answer: 1,024.` → 1024.0; None without one."""
    found = re.findall(r"answer:\s*(-?\d[\d,]*(?:\.\d+)?)", text, re.IGNORECASE)
    return float(found[-1].replace(",", "")) if found else None


def text_of(completion):
    """A completion is text where the prompt was text, and messages where it was messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def row(numbers):
    """A row of the dataset, of a random sum or product of three numbers."""
    a, b, c = (numbers.randint(2, 99) for _ in range(3))
    question = f"{a} {numbers.choice('+-*')} {b} {numbers.choice('+-*')} {c}"
    prompt = f"What is {question}? Write <calc>…</calc> to use a calculator. End with answer: and the number."
    return {"prompt": prompt, "answer": shown(arithmetic(question))}


if __name__ == "__main__":
    numbers = random.Random(0)
    for _ in range(int(sys.argv[1])):
        print(json.dumps(row(numbers), ensure_ascii=False))
