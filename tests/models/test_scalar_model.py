import pytest
import torch
from transformers import AutoModelForSequenceClassification

from conveyor.config import UserError
from conveyor.config.sections import Model
from conveyor.data.packing import lay_out
from conveyor.models.scalar_model import load_scalar_model, response_values, sequence_scores
from conveyor.models.train_engine import write_pretrained
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture
def model(folder):
    return load_scalar_model(Model(path=str(folder)))


ROWS = [[1, 40, 41, 42, 2], [1, 50], [1, 60, 61, 0, 62, 63, 64, 2]]
"""The last one has the pad token inside: only lengths say what is padding."""


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_case_11_a_row_alone_equals_the_row_in_a_batch(model, packed):
    alone = torch.cat([sequence_scores(model, lay_out([row], packed)) for row in ROWS])
    together = sequence_scores(model, lay_out(ROWS, packed))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert len(set(alone.tolist())) == 3


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_case_11_values_of_a_row_alone_equal_those_in_a_batch(model, packed):
    prompt_lengths, response_mask = torch.tensor([2, 1, 3]), torch.arange(5) < torch.tensor([3, 1, 5])[:, None]
    values = response_values(model, lay_out(ROWS, packed), prompt_lengths, response_mask)
    assert values.shape == (3, 5) and (values[~response_mask] == 0).all()
    for i, row in enumerate(ROWS):
        for t in range(len(row) - int(prompt_lengths[i])):
            before = row[: int(prompt_lengths[i]) + t]
            assert values[i, t].item() == pytest.approx(sequence_scores(model, lay_out([before], packed)).item(), abs=1e-5)


@torch.no_grad()
def test_case_10_save_and_load_keep_the_scores(model, tmp_path):
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    write_pretrained(model, weights, tmp_path / "saved", tiny_tokenizer())
    rows = [row for row in ROWS if 0 not in row]
    scores = sequence_scores(model, lay_out(rows, True))
    assert torch.equal(sequence_scores(load_scalar_model(Model(path=str(tmp_path / "saved"))), lay_out(rows, True)), scores)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    by_transformers = torch.cat([plain(torch.tensor([row])).logits[:, 0] for row in rows])
    torch.testing.assert_close(by_transformers, scores, atol=1e-6, rtol=0)


def test_case_10_a_checkpoint_without_the_head_raises(tmp_path):
    with pytest.raises(UserError, match=r"has no score.weight"):
        load_scalar_model(Model(path=str(save_tiny_policy(tmp_path / "policy"))))


@torch.no_grad()
def test_a_new_head_scores_zero_on_the_backbone_it_was_given(tmp_path):
    path = str(save_tiny_policy(tmp_path / "policy"))
    model = load_scalar_model(Model(path=path), new_head=True)
    assert model.config.num_labels == 1 and sequence_scores(model, lay_out(ROWS, True)).tolist() == [0, 0, 0]
    from conveyor.models.language_model import load_language_model

    assert torch.equal(model.model.embed_tokens.weight, load_language_model(Model(path=path)).model.embed_tokens.weight)


def test_a_classifier_of_three_labels_is_refused(tmp_path):
    from transformers import LlamaForSequenceClassification

    from tests.tiny import tiny_config

    LlamaForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="one label, this one has 3"):
        load_scalar_model(Model(path=str(tmp_path)))
