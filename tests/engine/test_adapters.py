"""LoRA rows on shared base weights: each as if its adapter were merged into a model of its own."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from interlens.adapters import attach
from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.interp import CaptureSpec
from tests.engine.test_faults import Own, raises
from tests.support.reference import check, drain, generate, prompt, same, steer
from tests.support.tiny import tiny

KEEP = tuple((layer, "residual") for layer in range(3))
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "mixtral": ["q_proj", "o_proj"]}


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def shared(request, tmp_path_factory):
    """A model with two adapters attached, and per name a model with that adapter merged by hand."""
    model, merged = tiny(request.param), {None: tiny(request.param)}
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("lora") / f"a{seed}"
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[request.param], init_lora_weights=False)
            get_peft_model(tiny(request.param), config).save_pretrained(folder)
        name = attach(model, folder)
        merged[name] = tiny(request.param)
        tensors = load_file(folder / "adapter_model.safetensors")
        for key in [key for key in tensors if "lora_A" in key]:
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            change = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            merged[name].get_submodule(path).weight.add_(8 / 4 * change)
    return model, merged


def requests(names, count=7, **options):
    sampling = Sampling(temperature=1.0, top_p=0.9, max_new_tokens=5)
    return [
        Request(
            tokens=(*prompt(36, 1), *prompt(1 + i, i)), sampling=sampling, key=("a", i), adapter=names[i % len(names)],
            capture=(CaptureSpec(),), logprobs=True, keep="bob", **options,
        )
        for i in range(count)
    ]  # fmt: skip


def test_rows_under_different_adapters_share_a_batch(shared):
    model, merged = shared
    pairs = [
        steer(1, (1,), 2.0),
        None,
        None,
        steer(2, (0, 2), 1.0, "norm_add"),
        None,
        steer(3, (1,), 1.0, "ablate"),
        None,
    ]
    asked = [
        replace(r, interventions=(pair[0],) if pair else ())
        for r, pair in zip(requests(list(merged)), pairs, strict=True)
    ]
    runs = [
        generate(merged[r.adapter], r, [pair[1]] if pair else [], KEEP) for r, pair in zip(asked, pairs, strict=True)
    ]
    for settings in (dict(), dict(chunk=5, rows=3), dict(reuse=False)):
        engine = Engine(model, **settings)
        for _ in range(2):
            for reply, run, each in zip(engine.run(asked), runs, asked, strict=True):
                check(reply, run, merged[each.adapter])
    logits = model(input_ids=torch.tensor([prompt(9)])).logits
    torch.testing.assert_close(logits, merged[None](input_ids=torch.tensor([prompt(9)])).logits)


def test_keys_and_values_of_one_adapter_are_never_used_under_another(shared):
    model, merged = shared
    engine = Engine(model)
    for turn in range(2):
        for name in merged:
            asked = requests([name], 1)[0]
            before = engine.counters["reused_tokens"]
            check(drain(engine, [engine.submit(asked)])[0], generate(merged[name], asked, (), KEEP), model)
            assert engine.counters["reused_tokens"] - before == (36 if turn else 0)


def test_an_exception_inside_leaves_no_adapter_behind(shared):
    model, merged = shared
    asked = requests(list(merged), 4)
    asked[2] = replace(asked[2], interventions=(Own(raises),))
    replies = Engine(model).run(asked)
    assert isinstance(replies[2].error, ZeroDivisionError)
    for i in (0, 1, 3):
        same(replies[i], Engine(model).run([asked[i]])[0], model)
    ids = torch.tensor([prompt(9)])
    torch.testing.assert_close(model(input_ids=ids).logits, merged[None](input_ids=ids).logits)
    refused = Engine(model).submit(replace(asked[0], adapter="nobody")).reply
    assert isinstance(refused.error, ValueError) and "nobody" in str(refused.error)
