"""Laws of gradients: right by finite differences, unchanged by padding, batching and recomputation."""

import pytest
import torch

import interlens
from interlens.errors import HookDidNotFire
from interlens.interp import (
    GradCaptureSpec,
    LinearBridge,
    VirtualTokenInjector,
    continuation_logprob,
    forward_with_grad,
    gumbel_softmax_tokens,
    soft_embed,
    span_pooled_residuals,
)
from interlens.interp.locate import decoder_layers, layers_with, sites_of
from tests.support.tiny import FAMILIES, tiny, token_ids

DENSE = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "falcon",
    "opt",
    "phi3",
    "olmo2",
    "granite",
    "mistral",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_a_plain_forward_and_hidden_states_are_connected(family):
    model, ids = tiny(family), token_ids(2)
    keys = [(site, layer) for site in sites_of(model) for layer in layers_with(model, site)]
    output = forward_with_grad(model, input_ids=ids, capture=GradCaptureSpec(sites_of(model)))
    torch.testing.assert_close(output.logits, model(ids).logits, rtol=0, atol=0)
    assert list(output.hidden) == keys
    for key, value in output.hidden.items():
        assert value.requires_grad, key
    (gradient,) = torch.autograd.grad(output.logits.sum(), output.hidden["residual", 0])
    assert gradient.abs().sum() > 0
    assert all(not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_gives_the_same_gradients_and_really_recomputes(family):
    model, ids = tiny(family), token_ids(2)
    embeds = model.get_input_embeddings()(ids).detach()
    calls = []
    handles = [m.register_forward_hook(lambda *a: calls.append(1)) for m in _inner(model)]
    results, counts = [], []
    flags = [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    wanted = GradCaptureSpec(tuple(s for s in sites_of(model) if s not in ("logits",)))
    for checkpoint in (False, True):
        calls.clear()
        leaf = embeds.clone().requires_grad_(True)
        output = forward_with_grad(model, inputs_embeds=leaf, capture=wanted, checkpoint=checkpoint)
        loss = output.logits.tanh().sum() + sum(value.tanh().sum() for value in output.hidden.values())
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
        counts.append(len(calls))
    for handle in handles:
        handle.remove()
    assert counts[0] == 3 and counts[1] >= 6
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    assert flags == [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    assert not any("forward" in vars(module) for module in model.modules())


def _inner(model):
    """One module inside each layer, whose calls are counted."""
    return [next(iter(layer.children())) for layer in decoder_layers(model)]


def test_recomputation_keeps_less_in_memory():
    model, ids = tiny("llama", num_hidden_layers=8), token_ids(2, 64)
    kept = []
    for checkpoint in (False, True):
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            forward_with_grad(model, input_ids=ids, checkpoint=checkpoint)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_anywhere_changes_neither_values_nor_gradients(family):
    model, ids = tiny(family), token_ids(3, 10)
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :4], mask[1, 7:], mask[2, [2, 5]] = 0, 0, 0
    table = model.get_input_embeddings()
    together = table(ids).detach().requires_grad_(True)
    output = forward_with_grad(model, inputs_embeds=together, attention_mask=mask, capture=GradCaptureSpec())
    real = mask.bool()
    (gradient,) = torch.autograd.grad(output.logits[real].tanh().sum(), together)
    assert gradient[~real].abs().max() == 0
    for row in range(3):
        alone = table(ids[row][real[row]])[None].detach().requires_grad_(True)
        single = forward_with_grad(model, inputs_embeds=alone, capture=GradCaptureSpec())
        torch.testing.assert_close(output.logits[row][real[row]], single.logits[0], rtol=1e-4, atol=1e-5)
        for key, value in single.hidden.items():
            torch.testing.assert_close(output.hidden[key][row][real[row]], value[0], rtol=1e-4, atol=1e-5)
        (expected,) = torch.autograd.grad(single.logits.tanh().sum(), alone)
        loose = 3e-3 if family == "qwen3_next" else 1e-4  # its delta rule's chunks round differently
        torch.testing.assert_close(gradient[row][real[row]], expected[0], rtol=1e-3, atol=loose)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_of_a_continuation_equal_finite_differences(family, checkpoint):
    model = tiny(family, torch.float64)
    prefix = model.get_input_embeddings()(token_ids(1, 3)).detach()[:, :, :]
    target, mask = token_ids(2, 2, seed=1), torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])

    def loss(small):
        embeds = torch.cat([prefix[..., :-3].expand(2, -1, -1), small], -1)
        return continuation_logprob(
            model, target_ids=target, prefix_embeds=embeds, attention_mask=mask, checkpoint=checkpoint
        )

    small = prefix[..., -3:].expand(2, -1, -1).clone().requires_grad_(True)
    exact = family in ("gpt2", "gpt_neox", "falcon", "opt")  # RMS norms compute in float32 whatever they are given
    tolerance = dict(eps=1e-6, atol=1e-6, rtol=1e-4) if exact else dict(eps=3e-3, atol=1e-3, rtol=1e-2)
    assert torch.autograd.gradcheck(loss, (small,), **tolerance)


def test_continuation_equals_log_softmax_of_a_plain_forward():
    model, prefix, target = tiny("gpt2"), token_ids(2, 5), token_ids(2, 4, seed=1)
    log_p = model(torch.cat([prefix, target], 1)).logits.log_softmax(-1)[:, 4:8].gather(-1, target[..., None])[..., 0]
    args = dict(target_ids=target, prefix_ids=prefix)
    torch.testing.assert_close(continuation_logprob(model, **args, reduction="none"), log_p)
    torch.testing.assert_close(continuation_logprob(model, **args), log_p.mean())
    torch.testing.assert_close(continuation_logprob(model, **args, reduction="sum"), log_p.sum(1).mean())
    keep = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]).bool()
    torch.testing.assert_close(continuation_logprob(model, **args, target_mask=keep), log_p[keep].mean())
    embeds = model.get_input_embeddings()(prefix)
    torch.testing.assert_close(continuation_logprob(model, target_ids=target, prefix_embeds=embeds), log_p.mean())
    shared = continuation_logprob(model, target_ids=target, prefix_ids=prefix[:1], reduction="none")
    torch.testing.assert_close(shared[0], log_p[0])
    one = continuation_logprob(model, target_ids=target[0], prefix_ids=prefix, reduction="none")
    torch.testing.assert_close(one[0], log_p[0])
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), prefix], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    torch.testing.assert_close(
        continuation_logprob(model, target_ids=target, prefix_ids=padded, attention_mask=mask, reduction="none"), log_p
    )


def test_what_cannot_be_meant_is_refused_before_the_forward():
    model, ids = tiny("llama"), token_ids(2, 4)
    for arguments, why in [
        (dict(target_ids=ids), "exactly one of prefix_ids"),
        (dict(target_ids=ids, prefix_ids=ids, reduction="max"), "'max'; possible: mean"),
        (dict(target_ids=token_ids(3, 4), prefix_ids=ids), "2 prefix rows for 3 targets"),
        (dict(target_ids=ids, prefix_ids=ids, attention_mask=torch.ones(2, 5)), r"must be \[2, 8\] or \[2, 4\]"),
        (dict(target_ids=ids, prefix_ids=ids, attention_mask=torch.zeros(2, 4)), "no real prefix token"),
        (dict(target_ids=ids, prefix_ids=ids, target_mask=torch.zeros(2, 4)), "counts no token"),
    ]:
        with pytest.raises(ValueError, match=why):
            continuation_logprob(model, **arguments)
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        forward_with_grad(model)
    with pytest.raises(ValueError, match="no site 'router'"):
        forward_with_grad(model, input_ids=ids, capture=GradCaptureSpec(("router",)))


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "gemma3", "granite", "gpt2", "opt_post_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_embeddings_of_one_hots_are_the_models_own(family, dtype):
    model, ids = tiny(family, dtype), token_ids(2)
    hot = torch.nn.functional.one_hot(ids, 100).to(dtype)
    torch.testing.assert_close(soft_embed(model, hot), model.get_input_embeddings()(ids), rtol=0, atol=0)
    torch.testing.assert_close(model(inputs_embeds=soft_embed(model, hot)).logits, model(ids).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="over 99 tokens"):
        soft_embed(model, hot[..., :99])


def test_gumbel_samples_follow_the_distribution_and_pass_gradients():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 0.0, 1.0]).requires_grad_(True)
    hard = gumbel_softmax_tokens(logits.expand(20_000, 3), hard=True)
    assert set(hard.detach().unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(hard.detach().mean(0), logits.detach().softmax(0), atol=0.02, rtol=0)
    (gradient,) = torch.autograd.grad((hard * torch.tensor([1.0, 0, 0])).mean(0).sum(), logits)
    assert gradient[0] > 0
    with pytest.raises(ValueError, match="tau"):
        gumbel_softmax_tokens(logits, tau=0)


def test_a_bridge_finds_a_linear_map():
    torch.manual_seed(0)
    truth, a = torch.randn(6, 4), torch.randn(50, 4)
    bridge = LinearBridge(4, 6, bias=True).fit(a, a @ truth.T + 2.0)
    torch.testing.assert_close(bridge(a), a @ truth.T + 2.0)
    torch.testing.assert_close(LinearBridge(4, 4)(a), a)


def test_lazy_names_are_in_the_top_package():
    for name in (
        "forward_with_grad",
        "continuation_logprob",
        "soft_embed",
        "VirtualTokenInjector",
        "RouterSteeringSpec",
    ):
        assert callable(getattr(interlens, name))


# -- on the embedded model ----------------------------------------------------------------------------------------


def test_virtual_tokens_take_the_placeholders_place(smollm2_float32):
    model, tokenizer = smollm2_float32.model, smollm2_float32.tokenizer
    injector = VirtualTokenInjector(tokenizer, 3)
    assert injector.token_id not in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    prompt = tokenizer(f"Say{injector.text} now", return_tensors="pt", add_special_tokens=False).input_ids
    words = tokenizer("one two three", add_special_tokens=False).input_ids[:3]
    table = model.get_input_embeddings()
    vectors = table(torch.tensor([words])).detach().requires_grad_(True)
    spelled = prompt.clone()
    spelled[prompt == injector.token_id] = torch.tensor(words)
    with injector.inject(model, vectors):
        logits = model(prompt).logits
    torch.testing.assert_close(logits, model(spelled).logits, rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(logits[0, -1, 0], vectors)[0].abs().sum() > 0
    with pytest.raises(HookDidNotFire, match=r"put injector\.text"), injector.inject(model, vectors):
        model(spelled)
    with pytest.raises(ValueError, match="each row needs them all"), injector.inject(model, vectors):
        model(prompt[:, :3])
    with pytest.raises(ValueError, match="neither pad, stop nor BOS"):
        VirtualTokenInjector(tokenizer, 2, placeholder=tokenizer.eos_token)
    assert not table._forward_hooks


def test_messages_pool_to_one_vector_each(smollm2_float32):
    from interlens.interp import message_token_spans

    model, tokenizer = smollm2_float32.model, smollm2_float32.tokenizer
    chat = [{"role": "user", "content": "Is cereal a soup?"}, {"role": "assistant", "content": "No, it is breakfast."}]
    pooled = span_pooled_residuals(model, tokenizer, chat, layers=[3], sites=("residual", "mlp"), grad=True)
    assert {key: tuple(v.shape) for key, v in pooled.items()} == {("residual", 3): (2, 576), ("mlp", 3): (2, 576)}
    assert all(value.requires_grad for value in pooled.values())
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
    hidden = model(ids, output_hidden_states=True).hidden_states[4][0]
    for row, (start, end) in enumerate(message_token_spans(tokenizer, chat)):
        torch.testing.assert_close(pooled["residual", 3][row], hidden[start:end].mean(0), rtol=1e-4, atol=1e-4)


def test_a_trained_soft_prompt_raises_the_targets_logprob(smollm2_float32):
    model, tokenizer = smollm2_float32.model.requires_grad_(False), smollm2_float32.tokenizer
    target = tokenizer(" a bowl of purple thunder", return_tensors="pt", add_special_tokens=False).input_ids
    prompt = torch.nn.Parameter(model.get_input_embeddings()(token_ids(1, 4)).detach())
    optimiser = torch.optim.Adam([prompt], lr=0.02)
    history = []
    for _ in range(50):
        value = continuation_logprob(model, target_ids=target, prefix_embeds=prompt, reduction="mean")
        optimiser.zero_grad()
        (-value).backward()
        optimiser.step()
        history.append(value.item())
    assert history[-1] > history[0] + 3.0
