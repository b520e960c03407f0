"""Laws of studies: batches of patched runs are the runs one by one; patterns and exported vectors are what they say."""

import math

import numpy as np
import pytest
import torch

from interlens.errors import UnknownSite, UnsupportedIntervention
from interlens.interp import Patch, Select, SteeringSpec, attention_patterns, capture_activations, export_control_vector
from interlens.interp.activation_cache import CaptureSpec
from interlens.interp.locate import layers_with, num_layers, sites_of
from interlens.studies import causal_trace, lens_table
from tests.support.tiny import FAMILIES, tiny, token_ids


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "gpt_neox"])
def test_a_trace_is_the_patched_runs_one_by_one(family):
    model, clean, corrupt = tiny(family), token_ids(1, 6, seed=1)[0], token_ids(1, 6, seed=2)[0]

    def metric(logits):
        return logits[0, -1, 7] - logits[0, -1, 9]

    trace = causal_trace(model, clean, corrupt, metric, positions=[0, 3, -1], batch_rows=4)
    assert trace.shape == (3, 3)
    for layer in range(3):
        values = capture_activations(model, clean[None], CaptureSpec(layers=layer))[0].tensor
        for column, position in enumerate([0, 3, 5]):
            with Patch(values[[position]], layer, position).register(model), torch.no_grad():
                alone = metric(model(corrupt[None]).logits)
            torch.testing.assert_close(trace[layer, column], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trace[2, 2], metric(model(clean[None]).logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("site", ["embed", "resid_mid", "attn", "mlp", "v", "head_out"])
def test_a_trace_of_a_prompt_with_itself_changes_nothing(site):
    model, ids = tiny("qwen3"), token_ids(1, 5)[0]
    trace = causal_trace(model, ids, ids, lambda logits: logits[0, -1, 3], site=site)
    assert trace.shape == (1 if site == "embed" else 3, 5)
    torch.testing.assert_close(trace, model(ids[None]).logits[0, -1, 3].expand_as(trace), rtol=1e-5, atol=1e-5)


def test_a_trace_that_cannot_be_is_refused():
    model, ids = tiny("llama"), token_ids(1, 5)[0]
    with pytest.raises(ValueError, match="has 5 tokens, the corrupt one 4"):
        causal_trace(model, ids, ids[:4], lambda logits: 0.0)
    with pytest.raises(ValueError, match="no position 5"):
        causal_trace(model, ids, ids, lambda logits: 0.0, positions=[5])
    with pytest.raises(UnknownSite):
        causal_trace(model, ids, ids, lambda logits: 0.0, layers=[3])


def test_the_lens_table_ends_with_what_the_model_says():
    model, ids = tiny("gemma2"), token_ids(1, 7)
    table = lens_table(model, ids, top=3)
    assert table.tokens.shape == (3, 7, 3)
    expected = model(ids).logits[0].log_softmax(-1).topk(3)
    assert torch.equal(table.tokens[-1], expected.indices)
    torch.testing.assert_close(table.logprobs[-1], expected.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen3_next"])
def test_patterns_are_causal_distributions_that_mix_the_values(family):
    model, ids = tiny(family, attn_implementation="eager"), token_ids(2, 10)
    patterns = attention_patterns(model, ids)
    assert [p.layer for p in patterns] == list(range(num_layers(model)))
    values = capture_activations(model, ids, CaptureSpec(tuple(s for s in ("v", "head_out") if s in sites_of(model))))
    values = {(c.layer, c.site): c.tensor for c in values}
    for layer, pattern in patterns:
        assert pattern.shape == (2, 4, 10, 10)
        total = pattern.sum(-1)
        assert (total <= 1 + 1e-5).all() if family == "gpt_oss" else torch.allclose(total, torch.ones_like(total))
        assert pattern.triu(1).abs().max() == 0
        if (layer, "v") in values:
            v = values[layer, "v"].view(2, 10, -1, values[layer, "head_out"].shape[-1] // 4).transpose(1, 2)
            mixed = (pattern @ v.repeat_interleave(4 // v.shape[1], 1)).transpose(1, 2).flatten(2)
            torch.testing.assert_close(mixed, values[layer, "head_out"], rtol=1e-4, atol=1e-5)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    padded = attention_patterns(model, ids, layers=[-1], attention_mask=mask)[0].pattern
    alone = attention_patterns(model, ids[:1, 4:], layers=[2])[0].pattern
    torch.testing.assert_close(padded[0], alone, rtol=1e-4, atol=1e-5)


def test_patterns_say_what_they_need():
    with pytest.raises(UnsupportedIntervention, match=r"runs 'sdpa'.*set_attn_implementation"):
        attention_patterns(tiny("llama"), token_ids())
    mixed = tiny("qwen3_next", attn_implementation="eager")
    assert [p.layer for p in attention_patterns(mixed, token_ids())] == list(layers_with(mixed, "q"))
    with pytest.raises(UnknownSite, match="layer 0 has no attention pattern; layers that have one: 1"):
        attention_patterns(mixed, token_ids(), layers=[0])


def test_a_control_vector_is_what_llama_cpp_reads(tmp_path):
    from gguf import GGUFReader

    model = tiny("llama")
    directions = {1: torch.randn(32), 2: torch.randn(32)}
    export_control_vector(SteeringSpec(directions, (1, 2), 1.5), tmp_path / "v.gguf", model)
    reader = GGUFReader(tmp_path / "v.gguf")
    assert reader.fields["general.architecture"].contents() == "controlvector"
    assert reader.fields["controlvector.model_hint"].contents() == "llama"
    assert reader.fields["controlvector.layer_count"].contents() == 2
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(tensors) == {"direction.1", "direction.2"}
    for layer, direction in directions.items():
        np.testing.assert_allclose(tensors[f"direction.{layer}"], 1.5 * direction.numpy(), rtol=1e-6)
    for bad, why in [
        (SteeringSpec(torch.ones(32), 0), "cannot steer layer 0"),
        (SteeringSpec(torch.ones(32), 1, mode="ablate"), "mode 'ablate'"),
        (SteeringSpec(torch.ones(32), 1, tokens=Select.prompt()), r"tokens prompt\(\)"),
    ]:
        with pytest.raises(ValueError, match=why):
            export_control_vector(bad, tmp_path / "w.gguf", model)
    assert not (tmp_path / "w.gguf").exists()


def test_a_metric_may_give_any_number():
    model, ids = tiny("gpt2"), token_ids(1, 4)[0]
    trace = causal_trace(model, ids, ids, lambda logits: math.pi, layers=0)
    assert trace.tolist() == [[pytest.approx(math.pi)] * 4]
