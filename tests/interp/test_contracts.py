"""Laws of what sites promise: who keeps it keeps all its sites, who breaks it loses those concerned."""

import pytest
import torch
import transformers

from interlens.errors import UnknownSite
from interlens.interp.families import Family, registry
from interlens.interp.lens import logit_lens, unembed
from interlens.interp.locate import decoder_layers, layers_with, num_layers, require_site, sites_of, verify
from interlens.interp.sites import refusals
from tests.interp.test_sites import read_all
from tests.support.tiny import _BASE, _IDS, FAMILIES, tiny, tiny_multimodal, token_ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_keeps_every_contract(family, dtype):
    model = tiny(family, dtype)
    before = sites_of(model)
    assert verify(model) == {}
    assert sites_of(model) == before


def test_every_registered_architecture_has_a_tiny_model():
    known = {tiny(family).config.model_type for family in FAMILIES}
    assert set(registry()) == known


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_of_the_last_layer_is_the_models_logits(family):
    model, ids = tiny(family), token_ids(2)
    values, output = read_all(model, ids, ["residual"])
    with torch.no_grad():
        logits = logit_lens(model, values[num_layers(model) - 1, "residual"])
    torch.testing.assert_close(logits, output.logits, rtol=1e-5, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_lens_of_a_multimodal_model():
    model, _ = tiny_multimodal()
    values, output = read_all(model, token_ids(2), ["final_norm"])
    torch.testing.assert_close(unembed(model, values[2, "final_norm"]), output.logits)


def test_a_broken_contribution_is_refused_by_name(monkeypatch):
    model = tiny("llama")
    wrong = {**registry()["llama"].points, "attn": registry()["llama"].points["head_out"]}
    monkeypatch.setitem(registry(), "llama", Family(model_types=("llama",), points=wrong))
    assert set(verify(model)) == {"attn", "mlp", "resid_mid"}
    with pytest.raises(UnknownSite, match=r"'mlp' for 'llama' \(at layer 0 resid_pre \+ attn \+ mlp is not residual\)"):
        require_site(model, "mlp")
    assert "residual" in sites_of(model)


def test_layers_that_do_not_hand_on_what_they_write_lose_the_stream():
    model = tiny("llama")
    handle = decoder_layers(model)[1].register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
    try:
        assert {"resid_pre", "residual"} <= set(verify(model))
    finally:
        handle.remove()
    assert verify(model) == {} and refusals(model) == {}


UNLISTED = {
    "cohere": ("Cohere", _BASE, {"attn", "mlp", "q", "k", "v", "head_out"}),
    "phi": ("Phi", _BASE, {"attn", "mlp", "q", "k", "v", "head_out"}),
    "starcoder2": ("Starcoder2", _BASE, {"attn", "mlp", "resid_mid", "q", "head_out"}),
    "stablelm": ("StableLm", _BASE, {"attn", "mlp", "resid_mid"}),
    "exaone4": ("Exaone4", dict(_BASE, sliding_window=8), {"attn", "mlp", "resid_mid"}),
    "smollm3": ("SmolLM3", dict(_BASE, **_IDS), {"attn", "mlp", "resid_mid"}),
    "dots1": ("Dots1", dict(
        _BASE, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    ), {"attn", "mlp", "resid_mid", "router"}),
    "jamba": ("Jamba", dict(
        _BASE, num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4,
    ), {"attn", "mlp", "resid_mid"}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLISTED)
def test_an_unlisted_architecture_works_by_its_declared_structure(name):
    kind, settings, expected = UNLISTED[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings)).eval()
    assert model.config.model_type not in registry(), "listed by now: the laws of families cover it; take it out here"
    found = set(sites_of(model))
    assert {"embed", "resid_pre", "residual", "final_norm", "logits"} | expected <= found
    values, output = read_all(model, token_ids(2))
    for layer in layers_with(model, "mlp"):
        total = values[layer, "resid_pre"] + values[layer, "attn"] + values[layer, "mlp"]
        torch.testing.assert_close(total, values[layer, "residual"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logit_lens(model, values[2, "residual"]), output.logits, rtol=1e-5, atol=1e-5)


def test_a_model_that_declares_nothing_is_refused_by_name():
    config = transformers.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises((UnknownSite, AttributeError), match=r"mamba|Mamba"):
        sites_of(model)
