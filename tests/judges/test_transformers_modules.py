"""checkpoint.load(path, into=model) gives a model of transformers what from_pretrained gives it, bit-for-bit."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from transformers_models import MODELS, TOKENS, logits, made  # noqa: E402

from shardwise import checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    """The name of an architecture, a checkpoint of it, and what from_pretrained makes of that."""
    folder = tmp_path_factory.mktemp(request.param)
    made(request.param).save_pretrained(folder)
    return request.param, folder, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def same_tensors(found, expected):
    """Every parameter and buffer, also those in no checkpoint, with equal bits; tied where they are tied."""
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        torch.testing.assert_close(ours[name].detach(), value.detach(), rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_model_with_memory(saved):
    name, folder, expected = saved
    model = made(name, seed=1)
    checkpoint.load(folder, into=model)
    same_tensors(model, expected)
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)


def test_a_model_on_the_meta_device(saved):
    name, folder, expected = saved
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    checkpoint.load(folder, into=model)
    same_tensors(model, expected)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)
