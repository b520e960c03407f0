"""Edits on a bare model mean the same tokens with any cache setting of transformers' own generate, or are refused.

The reference is a plain torch hook that is told where the prompt ends.
"""

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from interlens import Patch, Select, SteeringSpec
from interlens.interp.locate import decoder_layers
from tests.support.tiny import tiny, token_ids

DIRECTION = torch.randn(32, generator=torch.Generator().manual_seed(1))
RELATIVE = ("generated", "generated(1)", "prompt", "positions(-1)", "window(-3, -1)", "window(0, 2, of=generated)")
OPTIONS = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)


@contextmanager
def plainly_hooked(model, layer, tokens, num_prompt, use_cache=True):
    """Adds the direction at the positions of one row that `tokens` means, by a hook that is told the prompt's length."""
    first, last = {
        "generated": (num_prompt, 10**9), "generated(1)": (num_prompt - 1, 10**9), "prompt": (0, num_prompt),
        "positions(-1)": (num_prompt - 1, num_prompt), "window(-3, -1)": (num_prompt - 3, num_prompt - 1),
        "window(0, 2, of=generated)": (num_prompt, num_prompt + 2),
    }[tokens]  # fmt: skip
    seen = 0

    def hook(module, args, output):
        nonlocal seen
        hidden = output[0] if isinstance(output, tuple) else output
        start = seen if use_cache else 0
        at = torch.arange(start, start + hidden.shape[1])
        seen = start + hidden.shape[1]
        chosen = ((at >= first) & (at < last))[None, :, None]
        new = torch.where(chosen, hidden + 3 * DIRECTION, hidden)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handle = decoder_layers(model)[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def logits(model, ids, **options):
    return torch.stack(model.generate(ids, **{**OPTIONS, **options}).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("tokens", RELATIVE)
def test_edits_mean_the_same_tokens_with_and_without_a_cache(family, tokens):
    model, ids = tiny(family), token_ids(length=9)
    for layer in (0, 1):
        spec = SteeringSpec(DIRECTION, layer, coef=3, tokens=tokens)
        for use_cache in (True, False):
            with plainly_hooked(model, layer, tokens, 9, use_cache):
                expected = logits(model, ids, use_cache=use_cache)
            with spec.register(model):
                found = logits(model, ids, use_cache=use_cache)
                again = logits(model, ids[:, :5], use_cache=use_cache)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
            with plainly_hooked(model, layer, tokens, 5, use_cache):
                shorter = logits(model, ids[:, :5], use_cache=use_cache)
            torch.testing.assert_close(again, shorter, atol=2e-5, rtol=1e-4)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_rows_have_prompts_of_their_own(use_cache):
    model, ids = tiny("llama"), token_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3], ids[1, :3] = 0, 0
    with SteeringSpec(DIRECTION, 1, coef=3, tokens="generated").register(model):
        together = logits(model, ids, attention_mask=mask, use_cache=use_cache)
        alone = logits(model, ids[1:, 3:], use_cache=use_cache)
    torch.testing.assert_close(together[:, 1:], alone, atol=2e-5, rtol=1e-4)


def test_a_second_prompt_that_begins_like_the_first_is_a_prompt():
    model, ids = tiny("llama"), token_ids(length=9)
    spec = SteeringSpec(DIRECTION, 1, coef=3, tokens="positions(-1)")
    with spec.register(model):
        logits(model, ids[:, :5], use_cache=False)
        found = logits(model, ids, use_cache=False)
    with plainly_hooked(model, 1, "positions(-1)", 9, False):
        torch.testing.assert_close(found, logits(model, ids, use_cache=False), atol=2e-5, rtol=1e-4)
    with spec.register(model), torch.no_grad():
        model(ids[:, :5])
        with pytest.raises(ValueError, match=r"where the prompt ends is not known.*4 tokens more"):
            model(ids)


@pytest.mark.parametrize("tokens", RELATIVE)
@pytest.mark.parametrize("piece", [1, 2])
def test_a_prompt_in_pieces_is_refused_where_its_end_matters(tokens, piece):
    model, ids = tiny("llama"), token_ids(length=9)
    with SteeringSpec(DIRECTION, 1, tokens=tokens).register(model):
        with pytest.raises(ValueError, match=f"prefill_chunk_size={piece} feeds the prompt in pieces"):
            logits(model, ids, prefill_chunk_size=piece)
        assert logits(model, ids).shape[0] == 6
    patch = Patch(torch.ones(1, 32), 1, -1)
    with patch.register(model), pytest.raises(ValueError, match="in pieces"):
        logits(model, ids, prefill_chunk_size=piece)


def test_a_prompt_in_pieces_is_edited_where_its_end_does_not_matter():
    model, ids = tiny("llama"), token_ids(length=9)
    for tokens in ("all", "positions(0, 3, 10)"):
        with SteeringSpec(DIRECTION, 1, coef=3, tokens=tokens).register(model):
            whole, pieces = logits(model, ids), logits(model, ids, prefill_chunk_size=2)
        torch.testing.assert_close(pieces, whole, atol=2e-5, rtol=1e-4)


def test_forwards_by_hand_that_leave_the_prompts_end_open_are_refused():
    model, ids = tiny("llama"), token_ids(length=9)
    spec = SteeringSpec(DIRECTION, 1, tokens=Select.generated())
    with spec.register(model), torch.no_grad():
        cache = DynamicCache()
        model(ids[:, :4], past_key_values=cache)
        with pytest.raises(ValueError, match="3 tokens after a past of 4"):
            model(ids[:, 4:7], past_key_values=cache)
    with torch.no_grad():
        filled = model(ids[:, :4], use_cache=True).past_key_values
    with spec.register(model), torch.no_grad(), pytest.raises(ValueError, match="filled before"):
        model(ids[:, 4:5], past_key_values=filled)


def test_a_loop_by_hand_without_a_cache_goes_on_with_its_prompt():
    model, ids = tiny("llama"), token_ids(length=6)
    with SteeringSpec(DIRECTION, 1, coef=3, tokens="generated").register(model), torch.no_grad():
        for _ in range(4):
            last = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, last.argmax(-1, keepdim=True)], dim=1)
    with plainly_hooked(model, 1, "generated", 6, False), torch.no_grad():
        torch.testing.assert_close(last, model(ids[:, :-1], use_cache=False).logits[:, -1], atol=2e-5, rtol=1e-4)
