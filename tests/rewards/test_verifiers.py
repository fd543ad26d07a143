"""Ready-made reward functions: known values, arguments refused at load, packages that are missing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from conveyor.config import UserError
from conveyor.rewards import load_function
from conveyor.rewards.verifiers import HOMES
from conveyor.rewards.verifiers.texts import tagged


def verifier(name: str, **arguments):
    """The function as a recipe names it, with its arguments."""
    function = load_function(f"conveyor.rewards.verifiers:{name}", "rewards.r.function", arguments)
    return lambda completions, **columns: function(prompts=["p"] * len(completions), completions=completions, **columns, **arguments)


@pytest.mark.parametrize(("match", "scores"), [("search", [1, 1, 0]), ("full", [1, 0, 0])])
def test_regex(match, scores):
    assert verifier("regex", pattern=r"a.+c", match=match)(["a\nc", "xabc", "ac"]) == scores


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2 and 2</think><answer>4</answer>", 1),
        (" <think>\n</think>\n\n<answer>4\n</answer>\n", 1),
        ("<think></think> so <answer>4</answer>", 0),
        ("<answer>4</answer><think></think>", 0),
        ("<think></think><answer>4</answer><answer>5</answer>", 0),
        ("<think><think></think><answer>4</answer>", 0),
        ("<think>4</think>", 0),
        ("4", 0),
    ],
)
def test_format(text, score):
    assert verifier("format")([text, [{"role": "assistant", "content": text}]]) == [score, score]


def test_format_with_other_tags():
    assert verifier("format", tags=["plan", "code", "result"])(["<plan>a</plan><code>b</code><result>c</result>", "<plan></plan>"]) == [
        1,
        0,
    ]


def test_exact_answer():
    judge = verifier("exact_answer")
    assert judge([" 4\n", "5", "4", [{"role": "assistant", "content": "4"}]], answer=["4", "4", None, 4]) == [1, 0, None, 1]
    tagged = verifier("exact_answer", tag="answer", ignore_case=True)
    assert tagged(["<answer>3</answer>, no, <answer> Paris </answer>", "Paris"], answer=["paris", "paris"]) == [1, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<a>1</a> <a>2</a>", "2"), ("<a>1</a></a>", "1"), ("an <a> is <a>1</a>", "1"), ("<a>1</a> <a>2", "1"), ("<a></a>", ""),
        ("</a><a>", None), ("<a>", None), ("</a>", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_tag(text, found):
    assert tagged(text, "a") == found


def test_tags_that_do_not_end_cost_no_time():
    start = time.monotonic()
    assert tagged("<a>" * 50_000, "a") is None and tagged("<a>1</a>" + "<a>" * 50_000, "a") == "1"
    assert time.monotonic() - start < 1


def test_length_penalty_is_dapos():
    """Limit 10, buffer 4: nothing up to 6 tokens, then a quarter a token."""
    lengths = [1, 6, 7, 8, 10, 50]
    scores = verifier("length_penalty", limit=10, buffer=4)(["x"] * 6, completion_ids=[[0] * length for length in lengths])
    assert scores == [0, 0, -0.25, -0.5, -1, -1]
    assert verifier("length_penalty", limit=3)(["x"] * 2, completion_ids=[[0] * 3, [0] * 4]) == [0, -1]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("regex", {}, "pattern: give a regular expression"),
        ("regex", {"pattern": "("}, r"pattern: '\(' is no regular expression: missing \)"),
        ("regex", {"pattern": "a", "match": "fully"}, "match: 'fully' is neither search nor full"),
        ("format", {"tags": "think"}, "tags are names such as think, not 'think'"),
        ("length_penalty", {"limit": 4, "buffer": 5}, "limit, buffer: 4, 5: tokens, 0 ≤ buffer ≤ limit"),
        ("exact_answer", {"ignore_case": "yes"}, "ignore_case: 'yes'"),
        ("code", {"seconds": float("nan")}, "seconds: nan is not a finite number above 0"),
        ("code", {"seconds": float("inf")}, "seconds: inf is not a finite number above 0"),
        ("code", {"memory_mib": 1}, "memory_mib: 1 is not a whole number of at least 64"),
    ],
)
def test_wrong_arguments_are_refused_at_load(name, arguments, message):
    with pytest.raises(UserError, match=f"rewards.r.function: conveyor.rewards.verifiers:{name}: {message}"):
        verifier(name, **arguments)


def test_a_verifier_that_is_none():
    with pytest.raises(UserError, match=r"conveyor.rewards.verifiers has no guess"):
        verifier("guess")


@pytest.mark.parametrize(
    ("name", "package"), [("sentiment", "vaderSentiment"), ("math_verify", "math_verify"), ("reasoning_gym", "reasoning_gym")]
)
def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch, name, package):
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"conveyor.rewards.verifiers.{HOMES[name]}", raising=False)
    with pytest.raises(
        UserError, match=rf"rewards.r.function: the verifier {name} needs the package {package}\S*: pip install -e '\.\[verifiers\]'"
    ):
        verifier(name)


def test_sentiment():
    """The first is the example of VADER's own documentation."""
    texts = ["VADER is smart, handsome, and funny.", "The book was bad.", "The book."]
    assert verifier("sentiment")(texts) == [0.8316, -0.5423, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("1/2", r"so it is $\frac{1}{2}$", 1),
        (r"\frac{1}{2}", "The answer is 0.5", 1),
        (r"\sqrt{2}", r"\boxed{2^{1/2}}", 1),
        ("x^2+2x+1", "$(x+1)^2$", 1),
        ("1,024", "it is 1024.", 1),
        (72, "72", 1),
        ("42", "first 42, then 41", 0),
        ("3", "no idea", 0),
        ("", "3", None),
        (None, "3", None),
    ],
)
def test_math_verify(answer, text, score):
    assert verifier("math_verify")([text], answer=[answer]) == [score]


@pytest.mark.slow
def test_math_verify_works_off_the_main_thread():
    judge, scores = verifier("math_verify"), []
    thread = threading.Thread(target=lambda: scores.extend(judge(["$\\frac{2}{4}$"], answer=["0.5"])))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.slow
def test_reasoning_gym_scores_by_the_tasks_own_scorer():
    import json

    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", seed=1, size=1)[0]
    texts = [f"<think>?</think><answer> {entry['answer']} </answer>", entry["answer"], "7777"]
    for metadata in (entry["metadata"], json.dumps(entry["metadata"])):
        judge = verifier("reasoning_gym")
        assert judge(texts, answer=[entry["answer"]] * 3, metadata=[metadata] * 3) == [1.0, 1.0, 0.0]
    assert verifier("reasoning_gym", dataset="chain_sum")(texts[1:], answer=[entry["answer"]] * 2) == [1.0, 0.0]
    with pytest.raises(ValueError, match="name the reasoning-gym dataset"):
        verifier("reasoning_gym")(texts, answer=[entry["answer"]] * 3)
    with pytest.raises(UserError, match="reasoning-gym has no 'chain'"):
        verifier("reasoning_gym", dataset="chain")


@pytest.mark.slow
def test_no_verifier_loads_torch():
    code = f"""
import sys
from conveyor.rewards import verifiers
[getattr(verifiers, name) for name in {sorted(HOMES)!r}]
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("regex", {"patern": "a"}), ("regex", {"pattern": "a", "mode": "full"}), ("format", {"tag": ["a", "b"]}),
        ("length_penalty", {"limit": 12, "bufer": 3}), ("exact_answer", {"tags": "answer"}), ("math_verify", {"tolerance": 1}),
        ("sentiment", {"x": 1}), ("code", {"second": 1}), ("reasoning_gym", {"datset": "chain_sum"}),
    ],
)  # fmt: skip
def test_a_misspelt_argument_is_refused(name, arguments):
    with pytest.raises(UserError, match="takes no argument"):
        load_function(f"conveyor.rewards.verifiers:{name}", "rewards.r.function", arguments)
