"""liger-kernel needs a GPU: a stand-in for the package records what it is asked for."""

import sys
from types import ModuleType

import pytest
import torch

from conveyor.config import UserError
from conveyor.config.sections import Model
from conveyor.models import liger
from conveyor.models.language_model import load_language_model
from conveyor.models.scalar_model import load_scalar_model


@pytest.fixture
def asked(monkeypatch):
    """Keyword arguments of every call of its function for a model that is loaded."""
    calls: list[dict] = []
    package, transformers, patches = (ModuleType(f"liger_kernel{name}") for name in ("", ".transformers", ".transformers.monkey_patch"))
    package.__spec__ = object()
    transformers._apply_liger_kernel_to_instance = lambda **arguments: calls.append(arguments)
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for module in (package, transformers, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize("load", [load_language_model, lambda model: load_scalar_model(model, new_head=True)])
def test_a_loaded_model_gets_the_kernels_but_for_the_output_layer(asked, tiny_policy, load):
    model = load(Model(path=str(tiny_policy), liger=True))
    (call,) = asked
    assert call.pop("model") is model
    assert call == {
        "rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False,
    }  # fmt: skip


def test_by_itself_only_where_there_is_a_gpu(asked, tiny_policy, monkeypatch):
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        load_language_model(Model(path=str(tiny_policy)))
        load_language_model(Model(path=str(tiny_policy), liger=False))
        assert len(asked) == there


def test_models_that_it_does_not_know(asked, tiny_policy, monkeypatch):
    model = load_language_model(Model(path=str(tiny_policy)))
    model.config.model_type = "mamba"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not liger.apply_liger(model, None) and not asked
    with pytest.raises(UserError, match=r"model\.liger: liger-kernel has nothing for mamba models"):
        liger.apply_liger(model, True)


def test_asked_for_and_not_there(tiny_policy):
    with pytest.raises(UserError, match=r"model\.liger: the package liger-kernel is not installed"):
        load_language_model(Model(path=str(tiny_policy), liger=True))
