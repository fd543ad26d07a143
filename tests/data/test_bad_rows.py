"""A bad row is named by file and line, or left out and counted, as the recipe says: every fault, every data form."""

import pytest

from conveyor.config import UserError, sections
from conveyor.config.offline import Condition, ConditionClass
from conveyor.data.conditional import load_conditional
from conveyor.data.pairs import load_pairs
from conveyor.data.sft import load_sft
from conveyor.data.steps import load_steps
from conveyor.data.unpaired import load_unpaired
from tests.data.chats import TOKENIZER, assistant, user, write_jsonl
from tests.tiny import tiny_tokenizer

SCORE = Condition(template="{condition}{prompt}", mean=0.0, std=1.0)
CLASS = Condition(kind="class", template="{condition}{prompt}", classes={"expert": ConditionClass(text="GPT4")})
ANSWER, PAIR = {"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
FORMS = {
    "sft": (load_sft, ANSWER),
    "pairs": (load_pairs, PAIR),
    "labelled": (load_unpaired, ANSWER | {"label": True}),
    "labelled pairs": (load_unpaired, PAIR),
    "steps": (load_steps, {"prompt": "a", "completions": ["b"], "labels": [True]}),
    "score": (lambda data, tokenizer: load_conditional(data, SCORE, tokenizer)[0], ANSWER | {"reward": 1.0}),
    "class": (lambda data, tokenizer: load_conditional(data, CLASS, tokenizer)[0], ANSWER | {"class": "expert"}),
}
ANSWERED, PAIRED = ("sft", "labelled", "score", "class"), ("pairs", "labelled pairs")
FAULTS = [
    *[(form, b'{"prompt": "a\xff"}', "not UTF-8 (byte 0xff)") for form in FORMS],
    *[(form, b'{"prompt": ', "not valid JSON") for form in FORMS],
    *[(form, b'["a"]', "a row is a JSON object, this is a list") for form in FORMS],
    *[(form, {"prompt": None}, "prompt: missing") for form in ANSWERED],
    *[(form, {"completion": None}, "completion: missing") for form in ANSWERED],
    *[(form, {"completion": text}, "completion: empty") for form in ANSWERED for text in ("", " \n")],
    *[(form, {"completion": [assistant(" ")]}, "completion: an assistant message is empty") for form in ANSWERED],
    *[(form, {"completion": "b</s>c"}, "text follows an end-of-sequence token within a completion") for form in ANSWERED],
    *[(form, {side: None}, f"{side}: missing") for form in PAIRED for side in ("chosen", "rejected")],
    *[(form, {side: text}, f"{side}: empty") for form in PAIRED for side in ("chosen", "rejected") for text in ("", " ")],
    *[(form, {"chosen": "c"}, "chosen and rejected are identical") for form in PAIRED],
    *[(form, {"chosen": [assistant("c")]}, "chosen and rejected are identical") for form in PAIRED],
    *[(form, {"chosen": "c</s>"}, "chosen and rejected are identical") for form in PAIRED],
    *[("labelled", {"label": label}, "label: must be true or false, not ") for label in (0, 1, "true", 1.0, [])],
    ("labelled", {"label": None}, "label: missing"),
    ("steps", {"completions": [" "]}, "completions[0]: empty"),
    ("steps", {"completions": [], "labels": []}, "completions: no steps"),
    ("score", {"reward": "high"}, "reward: must be a finite number, not 'high'"),
    ("class", {"class": "novice"}, "class: unknown class 'novice'; one of expert"),
]


def check(tmp_path, caplog, form, fault, message, policy, tokenizer=TOKENIZER, **data):
    """One bad row on line 4 of a file with four good ones."""
    load, good = FORMS[form]
    bad = fault if isinstance(fault, bytes) else good | fault
    path = write_jsonl(tmp_path / "d.jsonl", [good, b"", good, bad, good, good])
    settings = sections.Data(path=str(path), on_bad_row=policy, **data)
    if policy == "error":
        with pytest.raises(UserError) as error:
            load(settings, tokenizer)
        assert str(error.value).startswith(f"{path}:4: {message}")
    else:
        items = load(settings, tokenizer)
        assert len(items) == (8 if form == "labelled pairs" else 4)
        assert f"{path}: dropped 1 malformed rows of 5; the first: {path}:4: {message}" in caplog.text


@pytest.mark.parametrize("policy", ["error", "drop"])
@pytest.mark.parametrize(("form", "fault", "message"), FAULTS)
def test_a_bad_row(tmp_path, caplog, form, fault, message, policy):
    check(tmp_path, caplog, form, fault, message, policy)


@pytest.mark.parametrize("policy", ["error", "drop"])
@pytest.mark.parametrize(("form", "key"), [*[(form, "completion") for form in ANSWERED], *[(form, "chosen") for form in PAIRED]])
def test_a_blank_completion_past_the_chat_template(tmp_path, caplog, form, key, policy):
    check(tmp_path, caplog, form, {key: " "}, f"{key}: empty", policy, apply_chat_template=False)


@pytest.mark.parametrize("policy", ["error", "drop"])
@pytest.mark.parametrize(("form", "key"), [*[(form, "completion") for form in ANSWERED], *[(form, "chosen") for form in PAIRED]])
def test_all_tokens_masked(tmp_path, caplog, form, key, policy):
    """A template that writes nothing for a prompt: the only token is the first, which nothing predicts."""
    tokenizer = tiny_tokenizer(add_bos=False)
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    check(tmp_path, caplog, form, {key: "</s>"}, "no token to learn: every token is masked", policy, tokenizer)


@pytest.mark.parametrize("policy", ["error", "drop"])
@pytest.mark.parametrize("form", FORMS)
def test_a_chat_that_the_template_refuses(tmp_path, caplog, form, policy):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('no system') }}{% endif %}"
        + tokenizer.chat_template
    )
    fault = {"prompt": [{"role": "system", "content": "s"}, user("a")]}
    check(tmp_path, caplog, form, fault, "the chat template refuses it: no system", policy, tokenizer)


def test_the_first_bad_row_of_the_file_is_the_one_named(tmp_path, caplog):
    """Whether it is found while reading or while tokenising."""
    rows = [ANSWER, ANSWER | {"completion": "b</s>c"}, ANSWER | {"completion": ""}]
    path = str(write_jsonl(tmp_path / "d.jsonl", rows))
    with pytest.raises(UserError, match=r"d.jsonl:2: text follows"):
        load_sft(sections.Data(path=path), TOKENIZER)
    load_sft(sections.Data(path=path, on_bad_row="drop"), TOKENIZER)
    assert "dropped 2 malformed rows of 3" in caplog.text and "d.jsonl:2: text follows" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_nothing_left_and_nothing_there(tmp_path, form):
    load, good = FORMS[form]
    path = str(write_jsonl(tmp_path / "d.jsonl", [b"x", b"y"]))
    with pytest.raises(UserError, match=r"d.jsonl: all 2 rows are malformed; the first: .*d.jsonl:1: not valid JSON"):
        load(sections.Data(path=path, on_bad_row="drop"), TOKENIZER)
    write_jsonl(tmp_path / "d.jsonl", [])
    with pytest.raises(UserError, match=r"d.jsonl: the dataset is empty"):
        load(sections.Data(path=path), TOKENIZER)
    write_jsonl(tmp_path / "d.jsonl", [good])
    with pytest.raises(UserError, match=r"every sample is longer than data.max_length \(2 tokens\)"):
        load(sections.Data(path=path, max_length=2), TOKENIZER)
    with pytest.raises(UserError, match=r"d.jsonl:1: \d+ tokens, data.max_length is 2"):
        load(sections.Data(path=path, max_length=2, on_long="error"), TOKENIZER)
