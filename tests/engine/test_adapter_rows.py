"""An adapter that attaches never fails its neighbours, and every row under it is PEFT's own forward of it alone."""

import json
from dataclasses import replace

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from interlens.adapter_checks import base_of
from interlens.adapter_config import why_not
from interlens.adapters import attach, attached, per_row
from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.errors import CannotLoad, UnsupportedIntervention
from tests.engine.test_adapter_kinds import ACTS, IDS, base, saved
from tests.support.reference import prompt
from tests.support.tiny import FAMILIES, MOE_FAMILIES, tiny

SCALE = 2e-5
"""By how much log-probabilities in float32 may differ between a batch and a forward alone."""


def linears(name):
    return sorted({key.rpartition(".")[2] for key, m in tiny(name).named_modules() if isinstance(m, nn.Linear)})


def check_in_engine(name, folders):
    """Rows of the base and of two adapters in one batch: the base's to the bit, the others as in PEFT, greedily.

    In sparse families neighbours decide how many tokens an expert multiplies at once, which may move the last bits.
    """
    model, untouched = base(name), base(name)
    names = [attach(model, folders[0]), None, attach(model, folders[1]), None]
    asked = [
        Request(tokens=prompt(7 + i, i), sampling=Sampling(temperature=0.0, max_new_tokens=4), key=i, adapter=adapter,
                logprobs=True) for i, adapter in enumerate(names)
    ]  # fmt: skip
    replies = Engine(model).run(asked)
    assert [reply.error for reply in replies] == [None] * 4
    alone = Engine(untouched).run([replace(request, adapter=None) for request in asked])
    for i in (1, 3):
        assert replies[i].tokens == alone[i].tokens
        said, wanted = (torch.tensor(each.logprobs["logprobs"]) for each in (replies[i], alone[i]))
        torch.testing.assert_close(said, wanted, atol=SCALE if name in MOE_FAMILIES else 0, rtol=0)
    for i, folder in ((0, folders[0]), (2, folders[1])):
        reference, ids = PeftModel.from_pretrained(base(name), folder).eval(), list(asked[i].tokens)
        for token, said in zip(replies[i].tokens, replies[i].logprobs["logprobs"], strict=True):
            with torch.no_grad():
                logprobs = reference(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert token == int(logprobs.argmax()) and abs(float(said) - float(logprobs[token])) < SCALE
            ids.append(token)


@pytest.mark.parametrize("options", ACTS.values(), ids=ACTS)
def test_what_acts_acts_in_the_engine(options, tmp_path):
    check_in_engine("llama", [saved(tmp_path / f"{seed}", seed=seed, **options) for seed in (1, 2)])


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_tied_ends_in_the_engine(targets, tmp_path):
    check_in_engine("gemma3", [saved(tmp_path / f"{seed}", "gemma3", seed, target_modules=targets) for seed in (1, 2)])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_acts_or_is_refused_before_a_batch(name, tmp_path):
    """Families that list the tokens of all rows (OPT, shared experts) act; routers that return tuples are refused."""
    folders = [saved(tmp_path / f"{seed}", name, seed, target_modules=linears(name)) for seed in (1, 2)]
    model = base(name)
    before = base_of(model)
    try:
        attach(model, folders[0])
    except CannotLoad as error:
        assert "cannot differ per row" in str(error) or "cannot share a batch" in str(error)
        assert base_of(model) == before and not attached(model)
        assert any(part in name for part in ("moe", "next", "deepseek", "mixtral")), "a dense family is refused"
        return
    if Engine(model)._forward.forkable:
        check_in_engine(name, folders)


def test_learned_positions_act(tmp_path):
    check_in_engine("gpt2", [saved(tmp_path / f"{seed}", "gpt2", seed, target_modules=["wpe"]) for seed in (1, 2)])


class Chosen(nn.Module):
    """An expert that sees a choice of all tokens, in an order of its own."""

    def __init__(self, mlp, order):
        super().__init__()
        self.mlp, self.order = mlp, order

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        picked = self.order(flat.shape[0])
        out = torch.zeros_like(flat)
        out[picked] = self.mlp(flat[picked])
        return out.view_as(x)


@pytest.mark.parametrize("order", [
    lambda n: torch.arange(n).flip(0), lambda n: torch.arange(0, n, 2), lambda n: torch.arange(2),
], ids=["reversed", "half", "as many as rows"])  # fmt: skip
def test_layers_that_see_a_choice_of_tokens_are_refused(order, tmp_path):
    folder = saved(tmp_path / "a", target_modules=["up_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k.replace(".mlp.", ".mlp.mlp."): v for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    model = base()
    for layer in model.model.layers:
        layer.mlp = Chosen(layer.mlp, order)
    plain = model(input_ids=IDS).logits
    with pytest.raises(CannotLoad, match=r"cannot share a batch|gets other logits"):
        attach(model, folder)
    assert not attached(model) and torch.equal(model(input_ids=IDS).logits, plain)


def test_an_adapter_saved_anew_in_its_folder_is_another(tmp_path):
    model = base()
    first = attach(model, saved(tmp_path / "a"))
    assert attach(model, tmp_path / "a") == first
    second = attach(model, saved(tmp_path / "a", seed=2))
    reference = PeftModel.from_pretrained(base(), tmp_path / "a").eval()
    with torch.no_grad(), per_row(model, [second, first, None]):
        rows = model(input_ids=IDS).logits
    assert second != first
    torch.testing.assert_close(rows[0], reference(input_ids=IDS).logits[0], atol=SCALE, rtol=1e-4)


BROUGHT = {
    "use_dora": {"use_dora": True}, "modules_to_save": {"modules_to_save": ["lm_head"]}, "bias": {"bias": "all"},
    "init_lora_weights": {"init_lora_weights": "pissa"}, "trainable_token_indices": {"trainable_token_indices": [3]},
    "IA3": None,
}  # fmt: skip


@pytest.mark.parametrize("key", BROUGHT)
def test_a_model_that_came_with_an_adapter_that_leaves_no_base_is_refused(key, tmp_path):
    """PEFT's saved modules act on rows of the base too, and PiSSA has already changed it: nobody may run beside them."""
    options = BROUGHT[key]
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[]) if options is None else None
    model = get_peft_model(base(), config or LoraConfig(r=4, target_modules=["q_proj"], **options)).eval()
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with pytest.raises(CannotLoad, match=f"came with adapter 'default'.*{key}"):
            attach(model, saved(tmp_path / "a"))
        with pytest.raises(UnsupportedIntervention, match=key), per_row(model, [None]):
            pass
        assert torch.equal(model(input_ids=IDS).logits, plain)
    asked = Request(tokens=prompt(5), sampling=Sampling(temperature=0.0, max_new_tokens=2), key=0)
    reply = Engine(model).submit(asked).reply
    assert isinstance(reply.error, UnsupportedIntervention) and key in str(reply.error)


def swap(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.flip(0)


def replicate(model):
    model.model.layers.append(model.model.layers[0])


def lose(model):
    del model.model.layers[1].mlp.up_proj.weight


def another_class(model):
    model.model.norm.__class__ = type("Norm", (type(model.model.norm),), {})


@pytest.mark.parametrize("change", [swap, replicate, lose, another_class])
def test_the_check_of_the_base_sees(change):
    model = base()
    before = base_of(model)
    assert base_of(model) == before
    with torch.no_grad():
        change(model)
    assert base_of(model) != before


def edit(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "lora_A" in key)
    save_file({**tensors, **change(key, tensors[key].clone())}, file)


FILES = {
    "nan": (lambda key, value: {key: value.fill_(float("nan"))}, "not all finite"),
    "whole numbers": (lambda key, value: {key: value.to(torch.int8)}, "torch.int8"),
    "magnitudes": (lambda key, value: {key.replace("A.weight", "magnitude_vector"): torch.ones(32)}, "neither of LoRA's"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", FILES)
def test_tensors_that_are_no_lora_are_refused_by_name(wrong, tmp_path):
    change, why = FILES[wrong]
    folder, model = saved(tmp_path / "a"), base()
    edit(folder, change)
    before = base_of(model)
    with pytest.raises(CannotLoad, match=why):
        attach(model, folder)
    assert base_of(model) == before and not attached(model)


def test_settings_that_are_no_settings_are_refused(tmp_path):
    folder = saved(tmp_path / "a")
    (folder / "adapter_config.json").write_text(json.dumps(["LORA"]))
    with pytest.raises(CannotLoad, match="no settings by name"):
        attach(base(), folder)


@pytest.mark.parametrize("value", [0, 0.0, "", "none", 1])
def test_a_value_of_an_unknown_option_is_never_taken_for_off(value):
    assert "of_a_later_peft" in why_not({"peft_type": "LORA", "of_a_later_peft": value})[0]
    assert why_not({"peft_type": "LORA", "bias": "none"}) == []


def test_an_offloaded_model_is_refused_and_stays(tmp_path):
    from accelerate import cpu_offload

    model = cpu_offload(base(), execution_device=torch.device("cpu"))
    with pytest.raises(CannotLoad, match="offloaded"):
        attach(model, saved(tmp_path / "a"))
    assert not attached(model)
