"""Numbers of numpy and torch count as Python's do; texts and booleans are refused; texts are selections."""

import re

import numpy as np
import pytest
import torch

from interlens import CaptureSpec, Select, SteeringSpec
from interlens.errors import UnknownSite
from interlens.interp import (
    ActivationCache,
    ActivationRecord,
    AlignedPatch,
    Layout,
    Patch,
    RouterSteeringSpec,
    attention_patterns,
    capture_activations,
)
from interlens.interp.locate import resolve_layers, site_width
from interlens.studies import causal_trace
from tests.support.tiny import tiny, token_ids

RECORD = ActivationRecord(
    participant="a", message_idx=0, layer=2, site="residual", tensor=torch.randn(3, 4), token_span=(3, 3),
    phases={"prompt": (0, 3)}, tokens=(5, 6, 7), positions=(0, 1, 2),
)  # fmt: skip
WHOLE = {
    "steering layers": lambda n: SteeringSpec(torch.ones(4), layers=n).layers,
    "steering list": lambda n: SteeringSpec(torch.ones(4), layers=[n, 7]).layers[:1],
    "difference of means": lambda n: (
        SteeringSpec.difference_of_means(torch.ones(2, 4), -torch.ones(2, 4), layers=n).layers
    ),
    "capture layers": lambda n: CaptureSpec(layers=n).layers,
    "patch layer": lambda n: Patch(torch.ones(1, 4), n, 0).layers,
    "patch positions": lambda n: Patch(torch.ones(1, 4), 0, n).positions,
    "patch position list": lambda n: Patch(torch.ones(1, 4), 0, [n]).positions,
    "patch shift": lambda n: (Patch.from_record(RECORD, shift=n).positions[0],),
    "aligned layer": lambda n: (AlignedPatch(torch.ones(1, 4), n, Select.all()).layer,),
    "router layers": lambda n: RouterSteeringSpec(torch.ones(4), n).layers,
    "toward load": lambda n: RouterSteeringSpec.toward_load(torch.ones(4), n).layers,
    "lead": lambda n: Select.generated(lead=n).args,
    "positions": lambda n: Select.positions(n).args,
    "message": lambda n: Select.message(n).args,
    "window start": lambda n: Select.window(n, 9).args[:1],
    "window stop": lambda n: Select.window(0, n).args[1:2],
}
MODEL = tiny("llama")
ON_MODEL = {
    "resolve": lambda n: resolve_layers(MODEL, n),
    "resolve list": lambda n: resolve_layers(MODEL, [n]),
    "width": lambda n: (2,) if site_width(MODEL, "residual", n) == 32 else (),
    "trace": lambda n: (2,) if causal_trace(
        MODEL, token_ids(), token_ids(), lambda logits: 0.0, layers=n, positions=[n]
    ).shape == (1, 1) else (),
    "capture": lambda n: tuple(c.layer for c in capture_activations(MODEL, token_ids(), CaptureSpec(layers=n))),
}  # fmt: skip
TWO = [2, np.int64(2), np.uint8(2), np.array(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)]
NOT_WHOLE = ["2", "16", b"2", True, False, np.bool_(True), torch.tensor(True), 2.5, torch.tensor(2.5), None, object()]


@pytest.mark.parametrize("place", [*WHOLE, *ON_MODEL])
def test_whole_numbers_of_every_kind_count_and_others_are_refused(place):
    take = (WHOLE | ON_MODEL)[place]
    for two in TWO:
        assert take(two) == (2,), (place, two)
        assert all(type(n) is int for n in take(two))
    for bad in NOT_WHOLE:
        if bad is None and place in ("capture layers", "resolve", "trace", "capture"):
            continue  # None is every layer there
        with pytest.raises((ValueError, UnknownSite), match=r"must be a whole number|no layer"):
            take(bad)
            pytest.fail(f"{place} took {bad!r}")


@pytest.mark.parametrize("place", ["steering layers", "capture layers", "resolve"])
def test_sequences_arrays_and_tensors_of_layers_are_the_same(place):
    take = (WHOLE | ON_MODEL)[place]
    for given in ([0, 2], (0, 2), range(0, 3, 2), np.array([0, 2]), torch.tensor([0, 2]), iter([0, np.int32(2)])):
        assert take(given) == (0, 2)
    for bad in ([True, False], ["0", "2"], "0,2", np.array([0.0, 2.0]), {0: 1}):
        with pytest.raises(ValueError):
            take(bad)


@pytest.mark.parametrize("make", [
    lambda coef: SteeringSpec(torch.ones(4), 0, coef).coef,
    lambda coef: RouterSteeringSpec(torch.ones(4), 0, coef).coef,
    lambda coef: CaptureSpec(max_norm=coef).max_norm,
])  # fmt: skip
def test_real_numbers_of_every_kind_count_and_others_are_refused(make):
    for half in (0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()):
        assert make(half) == 0.5 and type(make(half)) is float
    for bad in ("0.5", True, np.bool_(True), torch.tensor(True), float("nan"), float("inf"), 1j, [0.5], object()):
        with pytest.raises(ValueError, match="must be finite"):
            make(bad)


def test_a_number_that_is_given_otherwise_is_the_same_edit():
    plain = SteeringSpec(torch.ones(4), layers=2, coef=0.5)
    assert SteeringSpec(np.ones(4, dtype=np.float32), layers=np.int64(2), coef=np.float64(0.5)) == plain
    assert SteeringSpec({np.int64(2): torch.ones(4)}, layers=torch.tensor([2])).layers == (2,)


@pytest.mark.parametrize("make", [
    lambda tokens: SteeringSpec(torch.ones(4), 0, tokens=tokens).tokens,
    lambda tokens: RouterSteeringSpec(torch.ones(4), 0, tokens=tokens).tokens,
    lambda tokens: CaptureSpec(tokens=tokens).tokens,
    lambda tokens: AlignedPatch(torch.ones(1, 4), 0, tokens).tokens,
    lambda tokens: Select.of(tokens),
    lambda tokens: Select.special() | tokens,
    lambda tokens: Select.special() - tokens,
])  # fmt: skip
def test_a_text_is_taken_wherever_a_selection_is(make):
    selection = Select.phase("answer") - Select.window(0, 4)
    assert make("answer - window(0, 4)") == make(selection)
    with pytest.raises(ValueError, match=re.escape("'anwser'")):
        make("anwser")
    for bad in (3, True, ["answer"], None, slice(2)):
        with pytest.raises(ValueError, match=r"Select\.parse"):
            make(bad)


def test_a_text_narrows_the_rows_of_a_record_and_binds_to_a_prompt():
    assert Patch.from_record(RECORD, "positions(1, 2)").positions == (1, 2)
    spec = AlignedPatch(torch.ones(2, 4), 1, "message(0)")
    layout = Layout(message_spans={0: (1, 3)})
    assert spec.bound([5, 6, 7, 8], layout).positions == (1, 2)


def test_a_cache_is_asked_with_any_whole_number():
    cache = ActivationCache()
    cache.add(RECORD)
    for two in TWO:
        assert len(cache.query(layer=two)) == 1 and cache.at(layer=two).shape == (3, 4)
    for bad in ("2", True, 2.5):
        with pytest.raises(ValueError, match="layer must be a whole number"):
            cache.query(layer=bad)
    with pytest.raises(ValueError, match="no pool 'meen'"):
        cache.query(pool="meen")


def test_attention_patterns_take_the_same_numbers():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    assert [p.layer for p in attention_patterns(model, token_ids(), layers=np.int64(2))] == [2]
    with pytest.raises(ValueError, match="whole number"):
        attention_patterns(model, token_ids(), layers="12")
