"""Models with ALiBi are refused by name where an engine is made; what needs no engine works as with plain transformers."""

import pytest
import torch
import transformers

from interlens.engine import engine_for
from interlens.errors import UnsupportedIntervention
from interlens.interp import CaptureSpec, capture_activations
from tests.support.tiny import tiny, token_ids

MODELS = {
    "falcon": lambda: tiny("falcon", alibi=True),
    "falcon_new": lambda: tiny("falcon_new", alibi=True),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)
    ).eval(),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=100, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2)
    ).eval(),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_of_a_model_with_alibi_is_refused_by_name(name):
    model = MODELS[name]()
    for _ in range(2):
        with pytest.raises(UnsupportedIntervention, match=rf"{type(model).__name__} counts positions by ALiBi"):
            engine_for(model)


@pytest.mark.parametrize("name", ["falcon", "falcon_new"])
def test_what_needs_no_engine_works(name):
    model, ids = MODELS[name](), token_ids(2, 9)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states[2]
    found = capture_activations(model, ids, CaptureSpec(layers=1))[0].tensor
    torch.testing.assert_close(found, expected)


def test_rotary_falcon_is_served():
    assert engine_for(tiny("falcon")).live == []
