import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conveyor.quickstart.base_model import make_base_model
from conveyor.quickstart.evaluate import sample_responses
from conveyor.quickstart.task import Sizes, generate

ROWS = generate(0, Sizes(heldout=20, demonstrations=300, pairs_heldout=1, pairs=1, prompts=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base_model(folder, (f"{row['prompt']}\n{row['completion']}" for row in ROWS["sft"]), seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("text", ["Sort: d b f a c", "a b c d f", "Käse für 3 €, 北京 \t\n", " leading and trailing "])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_letter_of_the_task_is_one_token(tokenizer):
    assert tokenizer.tokenize("Sort: d b") == ["Sort", ":", "Ġd", "Ġb"]


def test_the_chat_template_writes_one_bos_and_ends_what_the_assistant_says(tokenizer):
    chat = [{"role": "user", "content": "Sort: b a"}, {"role": "assistant", "content": "a b"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s><|user|>Sort: b a<|assistant|>a b</s>"
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<s><|user|>Sort: b a<|assistant|>"


def test_special_tokens_are_single_tokens_and_differ(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(ids)) == 3
    assert tokenizer("<s><|user|><|assistant|></s>")["input_ids"] == tokenizer.convert_tokens_to_ids(
        ["<s>", "<|user|>", "<|assistant|>", "</s>"]
    )


def test_the_model_has_1_to_5_million_parameters_and_fits_its_tokenizer(model, tokenizer):
    assert 1e6 <= model.num_parameters() <= 5e6
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_the_seed_decides_over_the_weights(folder, tmp_path, model):
    texts = [f"{row['prompt']}\n{row['completion']}" for row in ROWS["sft"]]
    make_base_model(tmp_path / "same", texts, seed=0)
    make_base_model(tmp_path / "other", texts, seed=1)
    same, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("same", "other"))
    assert all(torch.equal(weight, same[name]) for name, weight in model.state_dict().items())
    assert not torch.equal(other["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_sampling_repeats_with_its_seed_and_leaves_the_random_state_alone(model, tokenizer):
    prompts = [row["prompt"] for row in ROWS["heldout"]]
    state = torch.random.get_rng_state()
    first = sample_responses(model, tokenizer, prompts, max_response_length=6, seed=3, batch_size=7)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(first) == len(prompts)
    assert sample_responses(model, tokenizer, prompts, max_response_length=6, seed=3, batch_size=7) == first
    assert sample_responses(model, tokenizer, prompts, max_response_length=6, seed=4, batch_size=7) != first


def test_sampling_follows_the_models_distribution(model, tokenizer):
    """No top-k, no top-p: the first token's frequencies are the model's probabilities, whatever the padding."""
    prompt, longer = "Sort: d b f a", "Sort: d b f a c e"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)["input_ids"]
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([ids])).logits[0, -1], 0)
    responses = sample_responses(model, tokenizer, [prompt, longer] * 1000, max_response_length=1, batch_size=500)[::2]
    letter = tokenizer.convert_tokens_to_ids("a")
    share = sum(response == "a" for response in responses) / len(responses)
    assert share == pytest.approx(float(expected[letter]), abs=4 * (float(expected[letter]) / 1000) ** 0.5)
    assert len(set(responses)) > 150
