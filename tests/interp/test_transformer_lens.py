"""Our sites against TransformerLens' own reimplementation of the same weights (built offline), hook by hook."""

import pytest
import torch

from interlens.interp import Select, SteeringSpec
from interlens.interp.locate import layers_with, num_layers
from tests.interp.test_sites import read_all
from tests.support.tiny import tiny, token_ids

HOOKS = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "residual": "hook_resid_post",
    "attn": "hook_attn_out",
    "mlp": "hook_mlp_out",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "head_out": "attn.hook_z",
}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request):
    """A tiny model and TransformerLens' model with its weights."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights

    model = tiny(request.param)
    shape = dict(n_layers=3, d_model=32, n_ctx=64, d_head=8, n_heads=4, d_vocab=100, device="cpu", seed=0)
    if request.param == "llama":
        config = HookedTransformerConfig(
            **shape, n_key_value_heads=2, d_mlp=48, act_fn="silu", gated_mlp=True, normalization_type="RMS",
            final_rms=True, positional_embedding_type="rotary", rotary_dim=8, rotary_adjacent_pairs=False,
            rotary_base=10000, eps=model.config.rms_norm_eps,
        )  # fmt: skip
        weights = convert_llama_weights(model, config)
    else:
        config = HookedTransformerConfig(**shape, d_mlp=128, act_fn="gelu_new", normalization_type="LN", eps=1e-5)
        weights = convert_gpt2_weights(model, config)
    hooked = HookedTransformer(config)
    hooked.load_state_dict(weights, strict=False)
    return model, hooked.eval().requires_grad_(False)


def test_every_shared_site_is_what_transformer_lens_says(pair):
    model, hooked = pair
    ids = token_ids(2)
    logits, cache = hooked.run_with_cache(ids)
    values, output = read_all(model, ids)
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[0, "embed"], cache["hook_embed"], rtol=1e-4, atol=1e-4)
    compared = 0
    for site, hook in HOOKS.items():
        for layer in layers_with(model, site):
            theirs = cache[f"blocks.{layer}.{hook}"]
            theirs = theirs.flatten(2) if theirs.dim() == 4 else theirs
            torch.testing.assert_close(values[layer, site], theirs, rtol=1e-4, atol=1e-4, msg=f"{site} {layer}")
            compared += 1
    assert compared == len(HOOKS) * num_layers(model)


@pytest.mark.parametrize("site", [*HOOKS, "embed"])
def test_an_edit_has_the_effect_that_transformer_lens_has(pair, site):
    model, hooked = pair
    ids, layer = token_ids(2), 0 if site == "embed" else 1
    name = "hook_embed" if site == "embed" else f"blocks.{layer}.{HOOKS[site]}"
    width = hooked.run_with_cache(ids)[1][name].flatten(2).shape[-1]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(0))

    def add(value, hook):
        value[:, [2, 5]] += direction.view(value.shape[2:])
        return value

    theirs = hooked.run_with_hooks(ids, fwd_hooks=[(name, add)])
    with SteeringSpec(direction, layer, site=name, tokens=Select.positions(2, 5)).register(model):
        mine = model(ids).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(mine, model(ids).logits, atol=1e-2)
