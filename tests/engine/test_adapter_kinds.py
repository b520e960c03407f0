"""Every PEFT configuration either acts per row as in PEFT's own forward, or is refused; the base never changes."""

import dataclasses
import re
from typing import get_args, get_type_hints

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file

from interlens.adapter_config import ADDS, ASIDE, KEEPS_BASE, REFUSED, why_not
from interlens.adapters import attach, attached, per_row
from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.errors import CannotLoad
from tests.support.reference import prompt
from tests.support.tiny import tiny

IDS = torch.tensor([prompt(9), prompt(9, 1), prompt(9, 2)])
ATTENTION = ["q_proj", "v_proj"]


def base(name="llama"):
    return tiny(name, torch.float32)


def saved(folder, name="llama", seed=1, drawn=True, **options):
    """An adapter as PEFT saves it after training: its tensors drawn anew, its configuration as given."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(
            base(name), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **options})
        )
        if drawn:
            for key, parameter in model.named_parameters():
                if ".lora_" in key or "modules_to_save" in key or "trainable_tokens" in key:
                    parameter.data = torch.randn_like(parameter) * 0.1
        model.save_pretrained(folder)
    return folder


def state(model):
    """Every module and the exact bits of every parameter of a model."""
    bits = {
        key.replace(".base_layer", ""): p.detach().clone() for key, p in model.named_parameters() if ".lora_" not in key
    }
    return [id(module) for module in model.modules()], bits


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def acts_as_in_peft(folder, other, name="llama"):
    """In one batch: row 0 is PEFT's own forward of this adapter, row 1 the base to the bit, row 2 another adapter."""
    model = base(name)
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        before = state(model)[1]
        mine, others = attach(model, folder), attach(model, other)
        assert same_bits(state(model)[1], before), "the base changed"
        assert torch.equal(model(input_ids=IDS).logits, plain), "attaching changed what the base computes"
        with per_row(model, [mine, None, others]):
            rows = model(input_ids=IDS).logits
        assert torch.equal(rows[1], plain[1])
        for row, where in ((0, folder), (2, other)):
            alone = PeftModel.from_pretrained(base(name), where).eval()(input_ids=IDS).logits
            torch.testing.assert_close(rows[row], alone[row], atol=2e-5, rtol=1e-4)
        assert (rows[0] - plain[0]).abs().max() > 1e-3, "it does nothing"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A plain second adapter."""
    return saved(tmp_path_factory.mktemp("other") / "b", seed=2)


ACTS = {
    "plain": {}, "rslora": {"use_rslora": True}, "rank pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha pattern": {"alpha_pattern": {"layers.1.self_attn.v_proj": 32}}, "lora bias": {"lora_bias": True},
    "every linear": {"target_modules": "all-linear"}, "some layers": {"layers_to_transform": [0, 2]},
    "excluded": {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    "embeddings": {"target_modules": ["embed_tokens"]}, "head": {"target_modules": ["lm_head", "q_proj"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dropout": {"lora_dropout": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("options", ACTS.values(), ids=ACTS)
def test_what_adds_acts_as_in_peft(options, other, tmp_path):
    acts_as_in_peft(saved(tmp_path / "a", **options), other)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3", "mixtral", "opt"])
def test_on_other_families(name, tmp_path):
    targets = {"gpt2": ["c_attn", "c_proj"], "gemma3": ["embed_tokens", "q_proj"]}.get(name, ["q_proj"])
    a, b = (saved(tmp_path / f"{seed}", name, seed, target_modules=targets) for seed in (1, 2))
    acts_as_in_peft(a, b, name)


def initialisations():
    """Every word that this PEFT takes as `init_lora_weights`."""
    hint = get_type_hints(LoraConfig)["init_lora_weights"]
    words = [word for part in get_args(hint) for word in get_args(part)]
    return [re.sub(r"\[.*\]", "4", word) for word in words] + [True, False]


@pytest.mark.parametrize("init", initialisations())
def test_initialisations_that_change_the_base_are_refused_and_others_act(init, other, tmp_path):
    untouched = state(base())[1]
    try:
        made = get_peft_model(base(), LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=init))
    except Exception:  # it wants data or a quantised model that a configuration cannot give: judged by name
        assert init not in KEEPS_BASE
        return
    keeps = same_bits({k.removeprefix("base_model.model."): v for k, v in state(made)[1].items()}, untouched)
    folder = saved(tmp_path / "a", init_lora_weights=init)
    if keeps and init in KEEPS_BASE:
        acts_as_in_peft(folder, other)
        return
    model = base()
    before = state(model)
    with pytest.raises(CannotLoad, match=f"init_lora_weights='{init}'.*path_initial_model_for_weight_conversion"):
        attach(model, folder)
    assert state(model)[0] == before[0] and same_bits(state(model)[1], before[1])
    assert init not in KEEPS_BASE and (not keeps or isinstance(init, str)), (
        "an initialisation that keeps the base is kept out"
    )


def test_a_converted_pissa_adapter_acts_as_its_difference(other, tmp_path):
    """PEFT's own way to convert: what is saved has rank 2r and stands on the untouched base."""
    model = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, init_lora_weights="pissa"))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "begun")
    model.peft_config["default"].init_lora_weights = "pissa"
    for key, parameter in model.named_parameters():
        if ".lora_" in key:
            parameter.data += 0.1 * torch.randn_like(parameter)
    trained = model.eval()(input_ids=IDS).logits.detach()
    model.save_pretrained(tmp_path / "a", path_initial_model_for_weight_conversion=str(tmp_path / "begun"))
    acts_as_in_peft(tmp_path / "a", other)
    fresh = base()
    with torch.no_grad(), per_row(fresh, [attach(fresh, tmp_path / "a")] * 3):
        torch.testing.assert_close(fresh(input_ids=IDS).logits, trained, atol=1e-4, rtol=1e-3)


NEVER = {
    "use_dora": {"use_dora": True}, "modules_to_save": {"modules_to_save": ["lm_head"]}, "bias='all'": {"bias": "all"},
    "bias='lora_only'": {"bias": "lora_only"}, "trainable_token_indices": {"trainable_token_indices": [3, 4]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5]},
}  # fmt: skip


@pytest.mark.parametrize("key", NEVER)
@pytest.mark.parametrize("first", [False, True], ids=["bare", "beside another"])
def test_what_cannot_differ_per_row_is_refused_and_nothing_changes(key, first, other, tmp_path):
    folder, model = saved(tmp_path / "a", drawn=False, **NEVER[key]), base()
    if first:
        attach(model, other)
    before, names = state(model), attached(model)
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with pytest.raises(CannotLoad, match=re.escape(key.partition("=")[0])):
            attach(model, folder)
        assert torch.equal(model(input_ids=IDS).logits, plain)
    assert state(model)[0] == before[0] and same_bits(state(model)[1], before[1]) and attached(model) == names


def test_adapters_of_experts_are_refused(tmp_path):
    config = {"peft_type": "LORA", "target_parameters": ["mlp.experts.down_proj"], "r": 4}
    assert "target_parameters" in why_not(config)[0]


def test_every_option_of_this_peft_is_known():
    """A PEFT with a new option fails here until somebody has said whether it can differ per row."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - ADDS - ASIDE - REFUSED.keys() - {"bias", "init_lora_weights"} == set()
    assert "of_a_later_peft=3" in why_not({"peft_type": "LORA", "of_a_later_peft": 3})[0]
    assert why_not({"peft_type": "LORA", "of_a_later_peft": None, "r": 8}) == []


@pytest.mark.parametrize("kind", [str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING])
def test_every_other_tuner_is_refused_by_name(kind):
    assert why_not({"peft_type": kind}) == [] if kind == "LORA" else kind in why_not({"peft_type": kind})[0]


WRONG = {
    "wider": (lambda key, value: value.repeat(1, 2) if "_A" in key else value, "has shape"),
    "other names": (lambda key, value: value, "does not have"),
    "half": (lambda key, value: None if "layers.2" in key else value, "not in both"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("first", [False, True], ids=["bare", "beside another"])
def test_an_adapter_of_another_base_leaves_nothing_behind(wrong, first, other, tmp_path):
    folder, model = saved(tmp_path / "a"), base()
    change, why = WRONG[wrong]
    tensors = load_file(folder / "adapter_model.safetensors")
    made = {key.replace("layers.2", "layers.7") if wrong == "other names" else key: change(key, value)
            for key, value in tensors.items()}  # fmt: skip
    save_file({k: v.contiguous() for k, v in made.items() if v is not None}, folder / "adapter_model.safetensors")
    names = [attach(model, other)] if first else []
    before = state(model)
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        with pytest.raises(CannotLoad, match=why):
            attach(model, folder)
        assert torch.equal(model(input_ids=IDS).logits, plain)
        assert state(model)[0] == before[0] and same_bits(state(model)[1], before[1])
        assert list(attached(model)) == names and hasattr(model, "peft_config") == first
        again = attach(model, saved(tmp_path / "c", seed=3))
        with per_row(model, [again, None, None]):
            assert not torch.equal(model(input_ids=IDS).logits[0], plain[0])


def test_a_trained_copy_of_the_embedding_is_refused(tmp_path):
    """PEFT saves the embedding along where it is a target: the base's own is left out, another is no LoRA."""
    folder = saved(tmp_path / "a", target_modules=["embed_tokens"])
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "base_layer" in key)
    save_file({**tensors, key: tensors[key] + 1}, folder / "adapter_model.safetensors")
    with pytest.raises(CannotLoad, match="replaces model\\.embed_tokens for every row"):
        attach(base(), folder)


def test_base_rows_of_a_batch_with_adapters_are_the_base_alone_in_the_engine(other, tmp_path):
    mine = saved(tmp_path / "a", target_modules="all-linear")
    model, untouched = base(), base()
    names = [attach(model, mine), None, attach(model, other), None]
    asked = [Request(tokens=prompt(7, i), sampling=Sampling(temperature=1.0, max_new_tokens=6), key=i, adapter=name,
                     logprobs=True) for i, name in enumerate(names)]  # fmt: skip
    mixed = Engine(model).run(asked)
    alone = Engine(untouched).run([dataclasses.replace(request, adapter=None) for request in asked])
    for i in (1, 3):
        assert mixed[i].tokens == alone[i].tokens
        assert mixed[i].logprobs == alone[i].logprobs
    assert mixed[0].tokens != alone[0].tokens or mixed[2].tokens != alone[2].tokens
    assert all(reply.error is None for reply in (*mixed, *alone))
