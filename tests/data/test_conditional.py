import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.config import UserError, sections
from conveyor.config.offline import Condition, ConditionClass
from conveyor.data.conditional import Normalisation, load_conditional
from conveyor.data.conditions import apply_template
from tests.data.chats import TOKENIZER, assistant, user, write_jsonl

CLASSES = {"expert": ConditionClass(text="GPT4", weight=1.0), "other": ConditionClass(text="GPT3", weight=0.1)}


def load(tmp_path, *rows, condition=None, **data):
    data = sections.Data(path=str(write_jsonl(tmp_path / "d.jsonl", rows)), **data)
    return load_conditional(data, condition or Condition(), TOKENIZER)


def scored(*rewards):
    return [{"prompt": "a {prompt}", "completion": "b", "reward": reward} for reward in rewards]


def texts(weighted):
    return [TOKENIZER.decode(item.sample.ids) for item in weighted]


def test_scores_are_normalised_rounded_and_written(tmp_path):
    """Rewards 1, 2, 3, 6: mean 3, deviation √3.5."""
    weighted, fitted = load(tmp_path, *scored(1, 2, 3, 6))
    assert (fitted.mean, fitted.std) == pytest.approx((3.0, 3.5**0.5))
    assert texts(weighted) == [f"<s><|user|>a {{prompt}} [{score}]<|assistant|>b</s>" for score in ("-1.1", "-0.5", "0.0", "1.6")]
    assert [item.weight for item in weighted] == [1.0] * 4
    assert TOKENIZER.decode(weighted[0].sample.ids[weighted[0].sample.mask]) == "b</s>"


def test_given_normalisation_goes_first(tmp_path):
    condition = Condition(mean=0.0, std=10.0, decimals=2, template="{condition}|{prompt}")
    weighted, fitted = load(tmp_path, *scored(1, -0.04), condition=condition)
    assert fitted == Normalisation(0.0, 10.0)
    assert [text[len("<s><|user|>") :][:5] for text in texts(weighted)] == ["0.10|", "0.00|"]
    assert load(tmp_path, *scored(1, 3), condition=Condition(mean=5.0))[1] == Normalisation(5.0, 1.0)
    assert load(tmp_path, *scored(1, 3), condition=Condition(std=5.0))[1] == Normalisation(2.0, 5.0)


@given(st.floats(-1e6, 1e6), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.integers(0, 6))
def test_written_scores(reward, mean, std, decimals):
    written = Normalisation(mean, std).text(reward, decimals)
    assert abs(float(written) - (reward - mean) / std) <= 0.5 * 10**-decimals * (1 + 1e-9) + 1e-6
    assert not (written.startswith("-") and float(written) == 0)


def test_classes_have_texts_and_weights(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "class": name} for name in ("other", "expert")]
    weighted, fitted = load(tmp_path, *rows, condition=Condition(kind="class", classes=CLASSES, template="{condition}: {prompt}"))
    assert fitted is None
    assert texts(weighted) == ["<s><|user|>GPT3: a<|assistant|>b</s>", "<s><|user|>GPT4: a<|assistant|>b</s>"]
    assert [item.weight for item in weighted] == [0.1, 1.0]


def test_the_condition_goes_to_the_last_user_message(tmp_path):
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    weighted, _ = load(tmp_path, {"messages": chat, "reward": 1}, condition=Condition(mean=0, std=1))
    assert texts(weighted) == ["<s><|user|>a<|assistant|>b</s><|user|>c [1.0]<|assistant|>d</s>"]
    assert TOKENIZER.decode(weighted[0].sample.ids[weighted[0].sample.mask]) == "d</s>"
    weighted, _ = load(tmp_path, {"messages": chat, "reward": 1}, condition=Condition(mean=0, std=1), train_on="assistant")
    assert TOKENIZER.decode(weighted[0].sample.ids[weighted[0].sample.mask]) == "b</s>d</s>"


def test_past_the_chat_template(tmp_path):
    weighted, _ = load(
        tmp_path, *scored(1), condition=Condition(mean=0, std=1, template="{prompt}({condition})"), apply_chat_template=False
    )
    assert texts(weighted) == ["<s>a {prompt}(1.0)b</s>"]


def test_equal_rewards_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"d.jsonl: reward is 0.1 in every row: there is nothing to condition on"):
        load(tmp_path, *scored(0.1, 0.1, 0.1))
    assert load(tmp_path, *scored(0.1, 0.1), condition=Condition(std=1.0))[1].std == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "reward: missing"),
        ({"prompt": "a", "completion": "b", "reward": "1"}, "reward: must be a finite number, not '1'"),
        ({"prompt": "a", "completion": "b", "reward": True}, "reward: must be a finite number, not True"),
        ({"prompt": "a", "completion": "b", "reward": float("nan")}, "reward: must be a finite number, not nan"),
        ({"prompt": "a", "completion": "b", "reward": 10**400}, "reward: must be a finite number, not 1000"),
        ({"prompt": [{"role": "system", "content": "a"}], "completion": "b", "reward": 1}, "there is no user message"),
        ({"messages": [assistant("b")], "reward": 1}, "messages: nothing stands before the assistant's message"),
        ({"messages": [user("b")], "reward": 1}, "messages: no assistant message to learn"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=f"d.jsonl:2: {message}"):
        load(tmp_path, scored(1)[0], row, scored(2)[0])
    assert len(load(tmp_path, *scored(1), row, *scored(2), on_bad_row="drop")[0]) == 2


@pytest.mark.parametrize(
    ("name", "message"), [("best", "unknown class 'best'; one of expert, other"), (None, "missing"), (3, "must be text, not int")]
)
def test_an_unknown_class_is_named(tmp_path, name, message):
    with pytest.raises(UserError, match=f"d.jsonl:1: class: {message}"):
        load(tmp_path, {"prompt": "a", "completion": "b", "class": name}, condition=Condition(kind="class", classes=CLASSES))


def test_rewards_of_csv_are_text(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,completion,reward\na,b,1\na,c,3e0\n")
    weighted, fitted = load_conditional(sections.Data(path=str(tmp_path / "d.csv")), Condition(), TOKENIZER)
    assert fitted == Normalisation(2.0, 1.0) and len(weighted) == 2
    (tmp_path / "d.csv").write_text("prompt,completion,reward\na,b,1\na,c,inf\na,c,4\n")
    with pytest.raises(UserError, match=r"d.csv:3: reward: must be a finite number, not 'inf'"):
        load_conditional(sections.Data(path=str(tmp_path / "d.csv")), Condition(), TOKENIZER)


def test_apply_template_leaves_the_rest_alone():
    chat = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{c}", "name": "n"})
    assert apply_template("[{prompt}]", chat) == [*chat[:2], {"role": "user", "content": "[{c}]", "name": "n"}]
    assert chat[2]["content"] == "{c}"


@pytest.mark.parametrize(("rewards", "settings"), [([1e308, 1.1e308], {}), ([1e308, -1e308], {}), ([0.0, 1.0], {"std": 1e-320})])
def test_rewards_that_cannot_be_normalised_are_refused(tmp_path, rewards, settings):
    with pytest.raises(UserError, match=r"reward: rewards of .* cannot be normalised"):
        load(tmp_path, *scored(*rewards), condition=Condition(**settings))


def test_a_given_normalisation_must_give_finite_numbers(tmp_path):
    """1e300 / 1e-10 is more than a float holds."""
    condition = Condition(mean=0.0, std=1e-10)
    with pytest.raises(UserError, match=r"d.jsonl:2: reward: 1e\+300 with mean 0 and std 1e-10 is not finite"):
        load(tmp_path, *scored(1, 1e300), condition=condition)
    assert len(load(tmp_path, *scored(1, 1e300), condition=condition, on_bad_row="drop")[0]) == 1


@pytest.mark.parametrize(("target", "decimals", "text"), [(-0.01, 1, "0.0"), (-0.4, 0, "0"), (1, 1, "1.0"), (None, 2, "1.00")])
def test_a_target_is_spelled_as_training_spells_it(target, decimals, text):
    assert Condition(target=target, decimals=decimals).target_text == text


def test_a_class_may_be_named_by_a_number():
    classes = {"1": {"text": "one"}, "2": {"text": "two", "weight": 2.0}}
    assert Condition(kind="class", classes=classes, target=1).target_text == "one"
    assert Condition(kind="class", classes=classes).target_text == "two"
