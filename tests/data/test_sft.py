import numpy as np
import pytest

from conveyor.config import UserError, sections
from conveyor.data.sft import load_sft
from tests.data.chats import ASSISTANT, BOS, EOS, TOKENIZER, USER, assistant, ids, user, write_jsonl
from tests.tiny import tiny_tokenizer


def load(tmp_path, *rows, tokenizer=TOKENIZER, **data):
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    return load_sft(sections.Data(path=str(path), **data), tokenizer)


def learnt(sample):
    return sample.ids[sample.mask].tolist()


def test_layouts_that_say_the_same_give_the_same_tokens(tmp_path):
    samples = load(
        tmp_path,
        {"prompt": "2+2=", "completion": "4!"},
        {"prompt": [user("2+2=")], "completion": [assistant("4!")]},
        {"prompt": [user("2+2=")], "completion": "4!"},
        {"messages": [user("2+2="), assistant("4!")]},
    )
    for sample in samples:
        assert sample.ids.tolist() == [BOS, USER, *ids("2+2="), ASSISTANT, *ids("4!"), EOS]
        assert learnt(sample) == [*ids("4!"), EOS]


def test_plain_text_past_the_template(tmp_path):
    (sample,) = load(tmp_path, {"prompt": "2+2=", "completion": "4"}, apply_chat_template=False)
    assert sample.ids.tolist() == [BOS, *ids("2+2=4"), EOS]
    assert learnt(sample) == [*ids("4"), EOS]


def test_text_rows_are_learnt_whole(tmp_path):
    (sample,) = load(tmp_path, {"text": "abc"})
    assert sample.ids.tolist() == [BOS, *ids("abc"), EOS]
    assert learnt(sample) == [*ids("abc"), EOS]


def test_train_on_all(tmp_path):
    (sample,) = load(tmp_path, {"prompt": "2+2=", "completion": "4"}, train_on="all")
    assert sample.mask.tolist() == [False] + [True] * (len(sample.ids) - 1)


def test_train_on_assistant_passes_over_answers_without_text(tmp_path):
    """A call of a tool, say; as a completion it would be malformed."""
    prompt = [user("a"), assistant(""), user("c"), assistant("d"), user("e")]
    (sample,) = load(tmp_path, {"prompt": prompt, "completion": "f"}, train_on="assistant")
    assert learnt(sample) == [*ids("d"), EOS, *ids("f"), EOS]


@pytest.mark.parametrize("apply", [True, False])
def test_train_on_assistant_of_a_text_prompt_is_the_completion(tmp_path, apply):
    rows = [{"prompt": "2+2=", "completion": "4"}]
    one, other = (load(tmp_path, *rows, apply_chat_template=apply, train_on=on)[0] for on in ("assistant", "completion"))
    assert one.mask.tolist() == other.mask.tolist() and not one.mask.all()


def test_every_assistant_turn_is_learnt(tmp_path):
    (sample,) = load(tmp_path, {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]})
    a, b, c, d = (ids(letter)[0] for letter in "abcd")
    assert sample.ids.tolist() == [BOS, USER, a, ASSISTANT, b, EOS, USER, c, ASSISTANT, d, EOS]
    assert np.flatnonzero(sample.mask).tolist() == [4, 5, 9, 10]


@pytest.mark.parametrize("completion", ["4", "4</s>", "4</s></s>"])
def test_end_of_sequence_stands_once(tmp_path, completion):
    for apply in (True, False):
        (sample,) = load(tmp_path, {"prompt": "2+2=", "completion": completion}, apply_chat_template=apply)
        assert learnt(sample) == [*ids("4"), EOS]


def test_what_a_template_writes_after_the_end_is_not_learnt(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "{{ eos_token + '\n' }}")
    (sample,) = load(tmp_path, {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}, tokenizer=tokenizer)
    assert sample.ids.tolist().count(ids("\n")[0]) == 1, "kept between turns, cut at the end"
    assert learnt(sample) == [*ids("b"), EOS, *ids("d"), EOS]


def test_a_templates_own_end_is_kept_and_a_missing_one_added(tmp_path):
    tokenizer = tiny_tokenizer()
    own = tokenizer.chat_template.replace("{{ eos_token }}", "[end]")
    tokenizer.chat_template = own
    (sample,) = load(tmp_path, {"prompt": "a", "completion": "b"}, tokenizer=tokenizer)
    assert learnt(sample) == ids("b[end]")
    tokenizer.chat_template = own.replace("[end]", "")
    (sample,) = load(tmp_path, {"prompt": "a", "completion": "b"}, tokenizer=tokenizer)
    assert learnt(sample) == [*ids("b"), EOS]


def test_a_template_that_rewrites_earlier_turns_is_refused_for_many_but_not_for_one(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (sample,) = load(tmp_path, {"messages": [user("a"), assistant("b")]}, tokenizer=tokenizer)
    assert learnt(sample) == [*ids("<think></think>b"), EOS]
    with pytest.raises(UserError, match=r"data.jsonl:1: the chat template renders an assistant message differently once others follow"):
        load(tmp_path, {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "completion: missing"),
        ({"completion": "a"}, "prompt: missing"),
        ({"prompt": "a", "completion": ""}, "completion: empty"),
        ({"prompt": "a", "completion": " "}, "completion: empty"),
        ({"prompt": "a", "completion": 4}, "completion: must be text or a list of messages, not int"),
        ({"prompt": "a", "completion": "b</s>c"}, "text follows an end-of-sequence token within a completion"),
        ({"messages": [user("a")]}, "messages: no assistant message to learn"),
        ({"messages": [user("a"), assistant("")]}, "messages: an assistant message is empty"),
        ({"messages": "a"}, "messages: must be a list of messages, not str"),
        ({"text": ""}, "text: empty"),
        ({"text": " \n"}, "text: empty"),
        ({"x": 1, "y": 2}, "needs `messages`, `prompt` and `completion`, or `text`; has x, y"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, message):
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(UserError, match=f"data.jsonl:2: {message}"):
        load(tmp_path, good, row)
    assert len(load(tmp_path, good, row, good, on_bad_row="drop")) == 2


def test_nothing_to_learn_is_refused(tmp_path):
    """Without BOS a text of one token is only a first token, which nothing predicts."""
    tokenizer = tiny_tokenizer(add_bos=False)
    with pytest.raises(UserError, match=r"data.jsonl:1: no token to learn: every token is masked"):
        load(tmp_path, {"text": "</s>"}, tokenizer=tokenizer)


def test_long_samples(tmp_path, caplog):
    rows = [{"text": "abcdefgh"}, {"text": "ab"}]
    assert [len(sample.ids) for sample in load(tmp_path, *rows, max_length=4)] == [4]
    assert "dropped 1 of 2 samples, longer than data.max_length (4 tokens)" in caplog.text
    with pytest.raises(UserError, match=r"data.jsonl:1: 10 tokens, data.max_length is 4"):
        load(tmp_path, *rows, max_length=4, on_long="error")
    with pytest.raises(UserError, match=r"every sample is longer than data.max_length"):
        load(tmp_path, rows[0], max_length=4)


def test_empty_file(tmp_path):
    with pytest.raises(UserError, match=r"data.jsonl: the dataset is empty"):
        load(tmp_path)
