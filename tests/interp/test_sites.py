"""Laws of sites: every value is where the definition says, on every family, through every wrapper."""

import pytest
import torch

from interlens.errors import HookDidNotFire, UnknownSite
from interlens.interp.hooks import attached
from interlens.interp.sites import (
    canonical_site,
    decoder_layers,
    describe,
    layers_with,
    num_layers,
    require_site,
    resolve_layers,
    site_width,
    sites_of,
)
from tests.tiny import FAMILIES, tiny, token_ids


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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_of_the_stream_between_attention_and_mlp_reaches_both(family):
    model, ids = tiny(family), token_ids(2)
    if "resid_mid" not in sites_of(model):
        pytest.skip("parallel blocks have no stream between attention and MLP")
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
