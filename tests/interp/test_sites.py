"""Laws of sites: every value is where the definition says, on every family, through every wrapper."""

import pytest
import torch

from interlens.errors import HookDidNotFire, UnknownSite
from interlens.interp.hooks import attached
from interlens.interp.locate import (
    decoder_layers,
    describe,
    layers_with,
    num_layers,
    require_site,
    resolve_layers,
    site_width,
    sites_of,
)
from interlens.interp.sites import canonical_site
from tests.support.tiny import FAMILIES, MOE_FAMILIES, tiny, tiny_multimodal, token_ids

NO_MIDDLE = ("opt_post_norm", "gpt_neox", "falcon", "falcon_new")
NORMED_QUERIES = ("qwen3", "gemma3", "olmo2", "olmo3", "olmoe", "qwen3_moe", "qwen3_next")
LATENT = ("deepseek_v2", "deepseek_v3")


def read_all(model, ids, sites=None):
    """Every site of every layer in one forward: {(layer, site): tensor}, and the output."""
    values = {}

    def keep(key):
        return lambda value: values.__setitem__(key, value.clone())

    keys = [(layer, site) for site in sites or sites_of(model) for layer in layers_with(model, site)]
    with torch.no_grad(), attached(model, {key: keep(key) for key in keys}):
        output = model(ids)
    return values, output


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_fires_with_its_shape(family):
    model, ids = tiny(family), token_ids(2)
    values, output = read_all(model, ids)
    for (layer, site), value in values.items():
        assert value.shape == (2, 12, site_width(model, site, layer)), (layer, site)
    torch.testing.assert_close(values[num_layers(model) - 1, "logits"], output.logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_stream_adds_up(family):
    model, ids = tiny(family), token_ids(2)
    values, _ = read_all(model, ids)
    names = sites_of(model)
    for layer in range(num_layers(model)):
        if layer:
            torch.testing.assert_close(values[layer, "resid_pre"], values[layer - 1, "residual"], rtol=0, atol=0)
        if "attn" in names:
            total = values[layer, "resid_pre"] + values[layer, "attn"] + values[layer, "mlp"]
            torch.testing.assert_close(total, values[layer, "residual"], rtol=1e-5, atol=1e-5)
        if "resid_mid" in names:
            middle = values[layer, "resid_pre"] + values[layer, "attn"]
            torch.testing.assert_close(middle, values[layer, "resid_mid"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_is_what_transformers_reports(family):
    model, ids = tiny(family), token_ids(2)
    values, _ = read_all(model, ids, ["residual", "final_norm"])
    reported = model(ids, output_hidden_states=True).hidden_states
    for layer in range(num_layers(model) - 1):
        torch.testing.assert_close(values[layer, "residual"], reported[layer + 1], rtol=0, atol=0)
    if family != "opt_post_norm":  # it has no final norm, and projects down instead
        torch.testing.assert_close(values[num_layers(model) - 1, "final_norm"], reported[-1], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_last_residual_is_the_last_layers_output(family):
    model, ids = tiny(family), token_ids(2)
    seen = []
    handle = decoder_layers(model)[-1].register_forward_hook(
        lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    values, _ = read_all(model, ids, ["residual"])
    handle.remove()
    torch.testing.assert_close(values[num_layers(model) - 1, "residual"], seen[0], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_changes_nothing_and_writing_back_changes_nothing(family):
    model, ids = tiny(family), token_ids(2)
    plain = model(ids).logits
    _, output = read_all(model, ids)
    torch.testing.assert_close(output.logits, plain, rtol=0, atol=0)
    keys = [(layer, site) for site in sites_of(model) for layer in layers_with(model, site)]
    with attached(model, {key: torch.clone for key in keys}):
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_is_causal_for_the_output(family):
    """Replacing any site's value changes what comes out; the edit of an earlier site is seen downstream."""
    model, ids = tiny(family), token_ids(2)
    plain = model(ids).logits
    for site in sites_of(model):
        layer = layers_with(model, site)[0]
        noise = torch.randn(site_width(model, site, layer), generator=torch.Generator().manual_seed(1)) * 3
        with attached(model, {(layer, site): lambda value, noise=noise: noise - 2 * value}):
            assert not torch.allclose(model(ids).logits, plain, atol=1e-3), site


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NO_MIDDLE])
def test_an_edit_of_the_stream_between_attention_and_mlp_reaches_both(family):
    model, ids = tiny(family), token_ids(2)
    shift = torch.randn(32, generator=torch.Generator().manual_seed(1))
    values = {}
    taps = {
        (1, "resid_mid"): lambda value: value + shift,
        (1, "mlp"): lambda value: values.__setitem__("mlp", value.clone()),
        (1, "attn"): lambda value: values.__setitem__("attn", value.clone()),
        (1, "resid_pre"): lambda value: values.__setitem__("pre", value.clone()),
        (1, "residual"): lambda value: values.__setitem__("post", value.clone()),
    }
    with torch.no_grad(), attached(model, taps):
        model(ids)
    torch.testing.assert_close(
        values["pre"] + values["attn"] + shift + values["mlp"], values["post"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_routed_and_shared_experts_make_the_mlp(family):
    model, ids = tiny(family), token_ids(2)
    values, _ = read_all(model, ids)
    factor = getattr(model.config, "residual_multiplier", 1.0)
    for layer in layers_with(model, "router"):
        total = values[layer, "expert_mix"]
        if "shared_expert" in sites_of(model):
            total = total + values[layer, "shared_expert"]
        torch.testing.assert_close(total * factor, values[layer, "mlp"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith("falcon")])
def test_heads_are_what_the_attention_function_is_given(family):
    """Against an attention implementation of transformers' registry that records its arguments: v everywhere; q and k
    at position 0, where rotary turns nothing, in families that do not norm them; its result is `head_out`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    seen = []

    def spy(module, query, key, value, *args, **kwargs):
        (
            kwargs.pop("s_aux", None),
            kwargs.pop("softcap", None),
        )  # which sdpa does not know, and which change neither q, k nor v
        output = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
        seen.append((query, key, value, output[0]))
        return output

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model, ids = tiny(family), token_ids(2)
    model.config._attn_implementation = "spy"
    names = sites_of(model)
    with torch.no_grad():
        values, _ = read_all(model, ids, [n for n in ("q", "k", "v", "head_out") if n in names])
    flat = [[part.transpose(1, 2).flatten(2) for part in (q, k, v)] + [out.flatten(2)] for q, k, v, out in seen]
    layers = layers_with(model, "v") or layers_with(model, "head_out")
    assert len(flat) == len(layers)
    for (q, k, v, out), layer in zip(flat, layers, strict=True):
        if family not in LATENT:
            torch.testing.assert_close(values[layer, "v"], v, rtol=0, atol=0)
            if family not in NORMED_QUERIES:
                for name, given in (("q", q), ("k", k)):  # up to a factor: OPT scales queries, gpt-oss both (YaRN)
                    similarity = torch.cosine_similarity(values[layer, name][:, 0], given[:, 0], dim=-1)
                    torch.testing.assert_close(similarity, torch.ones(2))
        if family != "qwen3_next":  # gated after attention
            torch.testing.assert_close(values[layer, "head_out"], out, rtol=0, atol=0)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.startswith("falcon")])
def test_falcon_heads_are_those_of_its_own_split(family):
    model, ids = tiny(family), token_ids(2)
    values, _ = read_all(model, ids, ["q", "k", "v"])
    fused = []
    attention = decoder_layers(model)[1].self_attention
    handle = attention.query_key_value.register_forward_hook(lambda m, a, out: fused.append(out))
    model(ids)
    handle.remove()
    q, k, v = attention._split_heads(fused[0])
    if family == "falcon_new":  # it repeats keys and values for every query of the group
        k, v = k[:, :, ::2], v[:, :, ::2]
    for name, part in zip("qkv", (q, k, v), strict=True):
        torch.testing.assert_close(values[1, name], part.flatten(2), rtol=0, atol=0)


def test_sites_see_through_an_adapter():
    from peft import LoraConfig, get_peft_model

    ids = token_ids(2)
    bare = get_peft_model(
        tiny("llama"), LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    ).eval()
    values, output = read_all(bare, ids)
    torch.testing.assert_close(values[2, "logits"], output.logits, rtol=0, atol=0)
    torch.testing.assert_close(
        values[0, "residual"], bare(ids, output_hidden_states=True).hidden_states[1], rtol=0, atol=0
    )
    reference, _ = read_all(tiny("llama"), ids)
    with bare.disable_adapter():
        off, _ = read_all(bare, ids)
    for key, value in off.items():
        torch.testing.assert_close(value, reference[key], rtol=0, atol=0)
    assert not torch.equal(values[0, "q"], reference[0, "q"])
    torch.testing.assert_close(values[0, "v"], reference[0, "v"], rtol=0, atol=0)


def test_the_text_decoder_of_a_multimodal_model():
    model, text = tiny_multimodal()
    ids = token_ids(2)
    values, output = read_all(model, ids)
    reference, expected = read_all(text, ids)
    assert set(values) == set(reference)
    torch.testing.assert_close(output.logits, expected.logits)
    for key, value in values.items():
        torch.testing.assert_close(value, reference[key])


def test_unknown_names_layers_and_silent_hooks_are_errors():
    model = tiny("gpt2")
    with pytest.raises(UnknownSite, match=r"resid_md.*embed, resid_pre"):
        canonical_site("resid_md")
    with pytest.raises(UnknownSite, match=r"no site 'router' for 'gpt2'; it has: embed"):
        require_site(model, "router")
    with pytest.raises(UnknownSite, match="0 to 2"):
        resolve_layers(model, (3,))
    with pytest.raises(UnknownSite, match="layer 7"), attached(model, {(7, "residual"): lambda v: None}):
        pass
    with pytest.raises(HookDidNotFire, match="residual at layer 1"), attached(model, {(1, "residual"): lambda v: None}):
        pass
    with pytest.raises(AttributeError, match="Linear"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_layers_resolve():
    model = tiny("llama")
    assert resolve_layers(model, None) == (0, 1, 2)
    assert resolve_layers(model, (-1, 0)) == (2, 0)
    assert resolve_layers(model, 1, "mlp") == (1,)
    assert resolve_layers(model, (1,), "embed") == (0,)
    assert resolve_layers(model, None, "logits") == (2,)
    assert resolve_layers(model, None, "blocks.1.hook_resid_post") == (1,)
    with pytest.raises(UnknownSite, match="layer 1"):
        resolve_layers(model, (0, 1), "blocks.1.hook_resid_post")


def test_a_failing_forward_leaves_no_hook():
    model, ids = tiny("mixtral"), token_ids()
    plain = model(ids).logits

    def fail(value):
        raise RuntimeError("tap")

    for key in [(1, "router"), (1, "resid_mid"), (2, "logits")]:
        with pytest.raises(RuntimeError, match="tap"), attached(model, {key: fail}):
            model(ids)
        assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)


def test_describe_lists_what_a_model_has():
    text = describe(tiny("mixtral"))
    assert "router" in text and "6" in text and "shared_expert" not in text
