import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.config import UserError, sections
from conveyor.data.steps import load_steps, step_ends
from tests.data.chats import ASSISTANT, BOS, TOKENIZER, USER, ids, user, write_jsonl


def load(tmp_path, *rows, **data):
    return load_steps(sections.Data(path=str(write_jsonl(tmp_path / "d.jsonl", rows)), **data), TOKENIZER)


ROW = {"prompt": "2+2=", "completions": ["two", "4"], "labels": [True, 0.25]}


@pytest.mark.parametrize("separator", ["\n", "##", " </s>"])
def test_each_step_ends_with_the_separators_last_token(tmp_path, separator):
    (item,) = load(tmp_path, ROW, step_separator=separator)
    start, between = [BOS, USER, *ids("2+2="), ASSISTANT], ids(separator)
    assert item.sample.ids.tolist() == [*start, *ids("two"), *between, *ids("4"), *between]
    first = len(start) + 3 + len(between) - 1
    assert item.ends.tolist() == [first, first + 1 + len(between)] and item.ends.dtype == np.int32
    assert item.labels.tolist() == [1.0, 0.25] and item.labels.dtype == np.float32
    assert set(item.sample.ids[item.sample.mask]) == set(between)


def test_prompts_past_the_template_and_as_messages(tmp_path):
    (item,) = load(tmp_path, ROW, apply_chat_template=False)
    assert item.sample.ids.tolist() == [BOS, *ids("2+2=two\n4\n")]
    one, other = load(tmp_path, ROW, ROW | {"prompt": [user("2+2=")]})
    assert one.sample.ids.tolist() == other.sample.ids.tolist()


def test_scoring_finds_the_steps_that_training_marked(tmp_path):
    (item,) = load(tmp_path, ROW, step_separator="##")
    start = len([BOS, USER, *ids("2+2="), ASSISTANT])
    assert [start + end for end in step_ends(item.sample.ids[start:].tolist(), ids("##"))] == item.ends.tolist()


@pytest.mark.parametrize(
    ("sampled", "separator", "ends"),
    [
        ([7, 5, 8, 9, 5, 6], [5], [1, 4, 5]),
        ([7, 5, 8, 5], [5], [1, 3]),
        ([7, 8], [5], [1]),
        ([5, 5, 5, 5, 5], [5, 5], [1, 3, 4]),
        ([7, 5, 6, 5, 5, 6], [5, 6], [2, 5]),
        ([5], [5, 6], [0]),
        ([], [5], []),
    ],
)
def test_step_ends_by_hand(sampled, separator, ends):
    assert step_ends(sampled, separator) == ends


@given(st.text("ab#", max_size=30), st.sampled_from(["#", "##", "a#"]))
def test_step_ends_are_those_of_split(text, separator):
    """On one token a character, the ends are where `str.split` cuts."""
    parts = text.split(separator)
    lengths = [len(part) + len(separator) for part in parts[:-1]] + [len(parts[-1])] * bool(parts[-1])
    assert step_ends([ord(c) for c in text], [ord(c) for c in separator]) == [int(n) - 1 for n in np.cumsum(lengths)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [True]}, "labels: 1 for 2 steps"),
        ({"labels": None}, "labels: missing"),
        ({"labels": True}, "labels: must be a list of truth values or numbers from 0 to 1, not bool"),
        ({"labels": [True, 1.5]}, r"labels\[1\]: must be true, false or a number from 0 to 1, not 1.5"),
        ({"labels": [-0.1, True]}, r"labels\[0\]: must be"),
        ({"labels": [float("nan"), True]}, r"labels\[0\]: must be"),
        ({"labels": ["true", True]}, r"labels\[0\]: must be"),
        ({"completions": []}, "completions: no steps"),
        ({"completions": None}, "completions: missing"),
        ({"completions": "two"}, "completions: must be a list of step texts, not str"),
        ({"completions": ["two", " "]}, r"completions\[1\]: empty"),
        ({"completions": ["two", 4]}, r"completions\[1\]: must be text, not int"),
        ({"completions": ["t\nwo", "4"]}, r"completions\[0\]: holds data.step_separator '\\n'"),
        ({"completions": ["two", "4\n"]}, r"completions\[1\]: holds data.step_separator '\\n'"),
        ({"prompt": ""}, "prompt: empty"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, change, message):
    with pytest.raises(UserError, match=f"d.jsonl:2: {message}"):
        load(tmp_path, ROW, json.loads(json.dumps(ROW | change)))
    assert len(load(tmp_path, ROW, ROW | change, ROW, on_bad_row="drop")) == 2


def test_a_step_that_completes_a_separator_too_early_is_refused(tmp_path):
    """`4#` + `##`: scoring finds the first two of three."""
    assert load(tmp_path, ROW | {"completions": ["#two", "4"]}, step_separator="##")
    with pytest.raises(UserError, match=r"completions\[1\]: holds data.step_separator '##'"):
        load(tmp_path, ROW | {"completions": ["two", "4#"]}, step_separator="##")


def test_long_rows(tmp_path, caplog):
    long = ROW | {"completions": ["two", "4" * 30]}
    assert len(load(tmp_path, long, ROW, max_length=20)) == 1
    assert "dropped 1 of 2 samples, longer than data.max_length (20 tokens)" in caplog.text
    with pytest.raises(UserError, match=r"d.jsonl:1: 42 tokens, data.max_length is 20"):
        load(tmp_path, long, max_length=20, on_long="error")
