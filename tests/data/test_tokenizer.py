import pytest

from conveyor.config import UserError, sections
from conveyor.data.tokenizer import encode_prompt, load_tokenizer
from tests.tiny import tiny_tokenizer

BOS, USER, ASSISTANT = 1, 3, 4


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edited(folder, **changes):
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return sections.Model(path=str(folder))


def test_loads_tokenizer_of_the_model(folder):
    assert load_tokenizer(sections.Model(path=str(folder))).pad_token_id == 0


def test_another_tokenizer_and_template_may_be_named(folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    model = sections.Model(path="org/any", tokenizer=str(folder), chat_template=str(tmp_path / "chat.jinja"))
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi", True)) == "[hi]"


@pytest.mark.parametrize("path", ["./absent", "/absent/model", "runs/absent/model"])
def test_missing_folder_is_named(path):
    with pytest.raises(UserError, match=r"model.path: .*absent.*: no such model folder"):
        load_tokenizer(sections.Model(path=path))


def test_missing_folder_beside_present_ones_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"model.path: runs/absent: no such model folder"):
        load_tokenizer(sections.Model(path="runs/absent"))


def test_missing_pad_token_names_the_key_and_the_way_out(tmp_path):
    with pytest.raises(UserError, match=r"model.path: .*no pad token; set `pad_token`"):
        load_tokenizer(edited(tmp_path / "m", pad_token=None))


def test_missing_template_file(folder):
    with pytest.raises(UserError, match=r"model.chat_template: absent.jinja: no such file"):
        load_tokenizer(sections.Model(path=str(folder), chat_template="absent.jinja"))


def test_template_that_is_not_utf8(folder, tmp_path):
    (tmp_path / "chat.jinja").write_bytes(b"a\n\xff")
    with pytest.raises(UserError, match=r"^model.chat_template: .*chat.jinja:2: not UTF-8 \(byte 0xff\)"):
        load_tokenizer(sections.Model(path=str(folder), chat_template=str(tmp_path / "chat.jinja")))


@pytest.mark.parametrize(("key", "model"), [("path", dict(path="")), ("path", dict(path=" ")), ("tokenizer", dict(path="m", tokenizer=""))])
def test_an_empty_path_is_named(key, model):
    with pytest.raises(UserError, match=rf"^model.{key}: empty; name a model folder or a hub id"):
        load_tokenizer(sections.Model(**model))


def test_missing_chat_template_names_the_way_out(tmp_path):
    tokenizer = load_tokenizer(edited(tmp_path / "m", chat_template=None))
    with pytest.raises(UserError, match=r"model.chat_template: .*data.apply_chat_template: false"):
        encode_prompt(tokenizer, "hi", True)
    assert encode_prompt(tokenizer, "hi", False)[0] == BOS


def test_bos_stands_once_though_template_and_tokenizer_both_have_it():
    """Case 8."""
    tokenizer = tiny_tokenizer(add_bos=True)
    hi = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert encode_prompt(tokenizer, "hi", True) == [BOS, USER, *hi, ASSISTANT]
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], True) == [BOS, USER, *hi, ASSISTANT]
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], False) == [BOS, USER, *hi, ASSISTANT]


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi"])
def test_bos_stands_once_before_plain_text(text):
    tokenizer = tiny_tokenizer(add_bos=True)
    assert encode_prompt(tokenizer, text, False) == [BOS, *tokenizer("hi", add_special_tokens=False)["input_ids"]]


def test_no_bos_where_neither_wants_one():
    tokenizer = tiny_tokenizer(add_bos=False)
    assert BOS not in encode_prompt(tokenizer, "hi", False)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    assert BOS not in encode_prompt(tokenizer, "hi", True)
