import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.config import UserError, sections
from conveyor.data.prompts import PromptOrder, load_prompts
from conveyor.types import Prompt
from tests.tiny import tiny_tokenizer


def load(tmp_path, rows, **data):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(sections.Data(path=str(path), **data), tiny_tokenizer())


def test_text_and_messages_give_the_same_tokens(tmp_path):
    messages = [{"role": "user", "content": "2+2="}]
    one, other = load(tmp_path, [{"prompt": "2+2=", "answer": "4"}, {"prompt": messages, "answer": "4"}])
    assert one.token_ids == other.token_ids
    assert one.token_ids[0] == 1 and one.token_ids.count(1) == 1
    assert (one.text, one.messages, one.columns) == ("2+2=", None, {"answer": "4"})
    assert other.messages == tuple(messages)
    assert other.text == "<s><|user|>2+2=<|assistant|>"


def test_a_column_that_some_rows_lack_is_none_there(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "4", "level": None}, {"prompt": "c", "level": 2}]
    prompts = load(tmp_path, rows)
    assert [p.columns for p in prompts] == [
        {"answer": None, "level": None},
        {"answer": "4", "level": None},
        {"answer": None, "level": 2},
    ]
    assert [p.columns for p in load(tmp_path, rows[:1])] == [{}]


def test_too_long_prompts_are_dropped_and_counted(tmp_path, caplog):
    """Case 13: BOS, user, 5 letters, assistant = 8 tokens; a limit of 8 is reached."""
    rows = [{"prompt": "abcd"}, {"prompt": "abcde"}, {"prompt": "abc"}]
    prompts = load(tmp_path, rows, max_prompt_length=8)
    assert [(p.index, p.row, p.text) for p in prompts] == [(0, 0, "abcd"), (1, 2, "abc")]
    assert "dropped 1 of 3 prompts, of data.max_prompt_length (8) tokens or more" in caplog.text


def test_too_long_prompts_stop_the_run_where_asked(tmp_path):
    with pytest.raises(UserError, match=r"prompts.jsonl:2: prompt: 8 tokens, data.max_prompt_length is 8"):
        load(tmp_path, [{"prompt": "a"}, {"prompt": "abcde"}], max_prompt_length=8, on_long="error")


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(UserError, match="none is left"):
        load(tmp_path, [{"prompt": "abcde"}], max_prompt_length=8)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "prompts.jsonl:2: prompt: missing"),
        ({"prompt": ""}, "prompts.jsonl:2: prompt: empty"),
        ({"prompt": 3}, "prompts.jsonl:2: prompt: must be text or a list of messages, not int"),
        ({"prompt": []}, "prompts.jsonl:2: prompt: no messages"),
        ({"prompt": [{"content": "x"}]}, r"prompts.jsonl:2: prompt\[0\]: a message is a mapping with `role` and `content`"),
        ({"prompt": [{"role": "user"}]}, r"prompts.jsonl:2: prompt\[0\].content: must be text"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, [{"prompt": "a"}, row])
    assert len(load(tmp_path, [{"prompt": "a"}, row], on_bad_row="drop")) == 1


def test_a_conversation_the_template_refuses_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('must start with user') }}{% endif %}x"
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": [{"role": "system", "content": "b"}]}\n')
    with pytest.raises(UserError, match=r"p.jsonl:2: the chat template refuses it: must start with user"):
        load_prompts(sections.Data(path=str(path)), tokenizer)


def test_a_template_that_fails_names_the_row(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 1 / 0 }}"
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"p.jsonl:1: the chat template fails: ZeroDivisionError: division by zero"):
        load_prompts(sections.Data(path=str(tmp_path / "p.jsonl")), tokenizer)


@pytest.mark.parametrize("template", ["x\n{% for %}", "x\n{{ messages | nothing_like_it }}"])
def test_a_template_that_is_not_jinja_names_its_key(tmp_path, template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"^model.chat_template: the chat template is not valid Jinja: line 2: .") as error:
        load_prompts(sections.Data(path=str(tmp_path / "p.jsonl"), on_bad_row="drop"), tokenizer)
    assert "\n" not in str(error.value)


def prompts(n):
    return [Prompt(index=i, row=i, token_ids=(1,), text=str(i)) for i in range(n)]


def test_remainder_is_a_short_last_step_or_dropped():
    """Case 23."""
    order = PromptOrder(prompts(10), 4, epochs=2, shuffle=True, seed=3)
    steps = [order[s] for s in range(len(order))]
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    for epoch in (steps[:3], steps[3:]):
        assert sorted(p.row for step in epoch for p in step) == list(range(10))
    assert [p.index for step in steps for p in step] == list(range(20))
    dropped = PromptOrder(prompts(10), 4, epochs=2, drop_last=True)
    assert [len(dropped[s]) for s in range(len(dropped))] == [4, 4, 4, 4]
    assert [p.index for s in range(4) for p in dropped[s]] == list(range(16))


def test_a_dataset_smaller_than_one_step_cannot_be_dropped():
    with pytest.raises(UserError, match=r"data.drop_last: 3 rows do not fill one batch of 4"):
        PromptOrder(prompts(3), 4, drop_last=True)


def test_steps_decide_over_epochs():
    assert len(PromptOrder(prompts(10), 4, steps=7)) == 7
    assert len(PromptOrder(prompts(10), 4, epochs=5, steps=2)) == 2


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.booleans(), st.integers())
def test_any_step_can_be_asked_alone(size, batch, epochs, shuffle, drop_last, seed):
    """Asking in any order, on a fresh object, gives what a whole run gives: a resumed run needs no state."""
    if drop_last and size < batch:
        return
    settings = dict(epochs=epochs, shuffle=shuffle, seed=seed, drop_last=drop_last)
    order = PromptOrder(prompts(size), batch, **settings)
    whole = [order[s] for s in range(len(order))]
    indexes = [p.index for step in whole for p in step]
    assert indexes == list(range(len(indexes)))
    for s in reversed(range(len(order))):
        assert PromptOrder(prompts(size), batch, **settings)[s] == whole[s] == order[s]
    for epoch in range(epochs):
        rows = [p.row for s in range(len(order)) if order.order.epoch(s) == epoch for p in whole[s]]
        assert len(rows) == len(set(rows)) == (size // batch * batch if drop_last else size)


def test_epochs_are_shuffled_differently():
    order = PromptOrder(prompts(20), 20, epochs=2)
    assert [p.row for p in order[0]] != [p.row for p in order[1]]
