"""Every sparse architecture of the installed transformers: its router is read from its own output, or refused by name.

The list is made from the configuration classes; the reference is a plain torch hook on the router module itself.
"""

from functools import cache

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from interlens.engine import Engine, Request, Sampling
from interlens.errors import UnknownSite, UnsupportedIntervention
from interlens.interp import CaptureSpec, capture_router_logits, moe_layer_indices, routing_of
from interlens.interp.locate import locator, require_site, sites_of
from tests.support.tiny import tiny

SMALL = dict(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, moe_intermediate_size=24, num_experts=8,
    n_routed_experts=8, num_local_experts=8, moe_num_experts=8, num_experts_per_tok=2, moe_topk=2, moe_k=2,
    top_k_experts=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_group=1,
    topk_group=1, num_expert_group=1, first_k_dense_replace=1, n_shared_experts=1, num_shared_experts=1,
    shared_expert_intermediate_size=24, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size_per_layer_input=0,
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_expand=2, mamba_dt_rank=4, ffn_hidden_size=48,
    expert_ffn_hidden_size=24, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, enable_moe_block=True, is_moe=True, moe_shared_expert_intermediate_size=24,
    zero_expert_num=2, expert_layer_offset=1, expert_layer_period=2, interleave_moe_layer_step=1, index_topk=8,
    index_n_heads=2, index_head_dim=8, vocab_size_per_layer_input=100, moe_layer_start_index=1, num_dense_layers=1,
    sliding_window=16, indexer_budget=16, indexer_compress_ratio=4, indexer_n_heads=2, indexer_kv_heads=1,
    indexer_head_dim=8,
)  # fmt: skip
OTHERWISE = (
    {}, {"num_key_value_heads": 4}, {"num_experts_per_tok": 1}, {"layer_types": ["full_attention"] * 4},
    {"num_key_value_heads": 4, "head_dim": 16},
)  # fmt: skip
"""What is tried in turn where an architecture does not take the settings as they are."""
UNBUILT = {
    "gemma4": "its text decoder is gemma4_text; the wrapper wants a vision configuration",
    "gemma4_assistant": "drafts for another model: it has no decoder of its own that takes tokens",
}
"""Sparse architectures that this test cannot build, and why."""


def text_of(name):
    try:
        return CONFIG_MAPPING[name]().get_text_config(decoder=True)
    except Exception as error:
        return error


def sparse() -> list[str]:
    """Causal language models whose text configuration speaks of experts, or cannot be made by default."""
    found = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        text = text_of(name) if name in CONFIG_MAPPING else None
        keys = [] if text is None else ["expert"] if isinstance(text, Exception) else [
            *text.to_dict(), *getattr(text, "attribute_map", {})
        ]  # fmt: skip
        if any("expert" in key or "moe" in key for key in keys):
            found.append(name)
    return found


SPARSE = sparse()


@cache
def built(name: str):
    """A tiny random model, or the last error."""
    text, error = text_of(name), None
    if isinstance(text, Exception):
        return text
    own = {*text.to_dict()} - {*getattr(text, "attribute_map", {})}
    made = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    for more in OTHERWISE:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                config = type(text)(**{key: value for key, value in {**SMALL, **more}.items() if key in own})
                model = made._from_config(config).eval().requires_grad_(False)
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, parameter.shape[-1] ** -0.5)
                model(input_ids=torch.arange(3, 11).view(1, 8), use_cache=False)
            return model
        except Exception as failed:
            error = failed
    return error


def test_the_list_is_not_empty_and_reasons_are_for_what_is_there():
    assert len(SPARSE) > 30 and {"mixtral", "llama4", "hunyuan_v1_moe", "afmoe"} & {*SPARSE}
    assert not {*UNBUILT} - {*SPARSE}


@pytest.mark.parametrize("name", SPARSE)
def test_a_router_is_read_from_its_own_output_or_refused_by_name(name):
    model = built(name)
    if name in UNBUILT:
        assert isinstance(model, Exception), f"{name} can be built: take it out of UNBUILT"
        return
    assert not isinstance(model, Exception), f"{name} cannot be built: {model}; mend SMALL, or say why in UNBUILT"
    ids, at = torch.arange(3, 15).view(1, 12), locator(model)
    have = sites_of(model)
    if "router" not in have:
        with pytest.raises(ValueError, match="can be read") as refused:
            moe_layer_indices(model)
        assert "dense" not in str(refused.value)
        with pytest.raises(UnknownSite, match="no site 'router'"):
            require_site(model, "router")
    else:
        seen = {}
        handles = []
        for layer in moe_layer_indices(model):
            module = at.place("router", layer).module
            handles.append(module.register_forward_hook(lambda m, a, out, layer=layer: seen.update({layer: out})))
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        captures = capture_router_logits(model, ids)
        assert [capture.layer for capture in captures] == list(moe_layer_indices(model))
        for capture in captures:
            parts = [part.reshape(12, -1) for part in seen[capture.layer]]
            picks = next(part for part in parts if not part.is_floating_point())
            torch.testing.assert_close(capture.router_logits, parts[0].float())
            assert torch.equal(capture.topk_experts.long(), picks.long())
    whole_run(model, ids, have)


def whole_run(model, ids, have):
    """One request through the engine with every site that the model has: its records, and its routing read back."""
    spec = CaptureSpec(sites=[site for site in have if site in ("residual", "attn", "mlp", "router")] or ["final_norm"])
    asked = Request(tokens=tuple(ids[0].tolist()), sampling=Sampling(temperature=0, max_new_tokens=2), capture=(spec,))
    try:
        engine = Engine(model, budget=4096)
    except UnsupportedIntervention:
        return
    reply = engine.run([asked])[0]
    if reply.error is not None and "router" not in str(reply.error):
        return  # what engines cannot run is refused elsewhere
    assert reply.error is None, reply.error
    records = [record for record in reply.records if record.site == "router"]
    assert bool(records) == ("router" in have)
    again = {capture.layer: capture for capture in capture_router_logits(model, ids)} if records else {}
    for capture in routing_of(model, records):
        ours, plain = capture.topk_experts[:12].sort().values, again[capture.layer].topk_experts.sort().values
        assert (ours != plain).float().mean() < 0.1  # near-ties may flip between shapes


def test_a_dense_model_is_still_called_dense():
    for family in ("llama", "gpt2", "gemma3"):
        with pytest.raises(ValueError, match="is a dense model"):
            moe_layer_indices(tiny(family))
