"""Laws of the opt-in site `pattern`: what transformers reports, from `capture_activations` alone, on eager alone."""

import pytest
import torch

from interlens import Conversation, ScriptedParticipant
from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.errors import UnknownSite, UnsupportedIntervention
from interlens.interp import (
    ActivationCache,
    CaptureSpec,
    Patch,
    Select,
    SteeringSpec,
    attached,
    canonical_site,
    capture_activations,
    describe,
    require_site,
    resolve_layers,
    sites_of,
)
from interlens.rollout import run
from tests.support.tiny import tiny, token_ids
from tests.support.tokenizers import family as tokenizer_of

PATTERN = CaptureSpec("pattern")


def reported(model, ids):
    with torch.no_grad():
        return model(ids, output_attentions=True, use_cache=False).attentions


@pytest.fixture
def forwards():
    """Counts the forwards of a model."""
    handles, counts = [], []

    def watch(model):
        handles.append(model.register_forward_pre_hook(lambda *_: counts.append(1)))
        return counts

    yield watch
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_pattern_is_what_transformers_reports(family):
    model, ids = tiny(family, attn_implementation="eager"), token_ids(2, 9)
    both, one = reported(model, ids), reported(model, ids[:1])
    got = capture_activations(model, ids, PATTERN)
    assert [(c.layer, c.site) for c in got] == [(0, "pattern"), (1, "pattern"), (2, "pattern")]
    for captured in got:
        assert captured.tensor.shape == (2, 4, 9, 9)
        torch.testing.assert_close(captured.tensor, both[captured.layer], rtol=0, atol=0)
    for row in (ids[:1], ids[0]):
        for offload in ("cpu", None):
            (alone,) = capture_activations(model, row, CaptureSpec("pattern", -1, offload))
            assert alone.layer == 2 and alone.tensor.shape == (4, 9, 9)
            torch.testing.assert_close(alone.tensor, one[2][0], rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_a_mask_each_row_is_the_row_alone(family):
    model, ids = tiny(family, attn_implementation="eager"), token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    for layer, _, rows in capture_activations(model, ids, PATTERN, mask):
        assert isinstance(rows, list) and [tuple(row.shape) for row in rows] == [(4, 5, 5), (4, 9, 9)]
        for row, alone in zip(rows, (ids[:1, 4:], ids[1:]), strict=True):
            torch.testing.assert_close(row, reported(model, alone)[layer][0], rtol=1e-4, atol=1e-5)


def test_beside_other_sites_each_is_what_it_is_alone_in_the_order_asked():
    model, ids = tiny("llama", attn_implementation="eager"), token_ids(1, 7)
    sites = ("residual", "pattern", "logits", "v")
    got = capture_activations(model, ids, CaptureSpec(sites, (2, 0)))
    assert [(c.layer, c.site) for c in got] == [
        (0, "residual"), (0, "pattern"), (0, "v"), (2, "residual"), (2, "pattern"), (2, "logits"), (2, "v"),
    ]  # fmt: skip
    alone = {
        (c.layer, c.site): c.tensor for s in sites for c in capture_activations(model, ids, CaptureSpec(s, (0, 2)))
    }
    assert len(alone) == len(got)
    for layer, site, tensor in got:
        torch.testing.assert_close(tensor, alone[layer, site], rtol=0, atol=0)


def test_only_layers_that_attend_have_one():
    model, ids = tiny("qwen3_next", attn_implementation="eager"), token_ids(1, 7)
    assert [c.layer for c in capture_activations(model, ids, PATTERN)] == [1]
    for layers, why in [
        ((0,), "layers that have one: 1"),
        ((3,), "layer 3"),
        ((), "no layer given"),
    ]:
        with pytest.raises(UnknownSite, match=why):
            capture_activations(model, ids, CaptureSpec("pattern", layers))
    with pytest.raises(ValueError, match="got True"):
        CaptureSpec("pattern", (True,))


def test_without_eager_it_is_refused_before_any_forward(forwards):
    model, ids = tiny("llama", attn_implementation="sdpa"), token_ids(1, 7)
    count = forwards(model)
    for sites in ("pattern", ("residual", "pattern")):
        with pytest.raises(UnsupportedIntervention, match=r"eager.*runs 'sdpa'.*load with attention='eager'"):
            capture_activations(model, ids, CaptureSpec(sites))
    assert not count
    model.set_attn_implementation("eager")
    assert len(capture_activations(model, ids, PATTERN)) == 3 and count


def test_tokens_and_pools_do_not_apply_to_it(forwards):
    model, ids = tiny("llama", attn_implementation="eager"), token_ids(1, 7)
    count = forwards(model)
    for options in ({"tokens": Select.window(0, 2)}, {"pool": "mean"}):
        with pytest.raises(ValueError, match="whole rows"):
            capture_activations(model, ids, CaptureSpec(("residual", "pattern"), **options))
    assert not count


def test_it_is_opt_in():
    model = tiny("llama", attn_implementation="eager")
    assert "pattern" not in (*CaptureSpec().sites, *sites_of(model))
    assert "pattern" in describe(model).splitlines()[-1]
    calls = [
        lambda: canonical_site("blocks.1.attn.hook_pattern"),
        lambda: require_site(model, "pattern"),
        lambda: resolve_layers(model, None, "pattern"),
        lambda: SteeringSpec(torch.ones(32), 1, site="pattern"),
        lambda: Patch(torch.ones(1, 32), 1, 0, site="pattern"),
    ]
    for call in calls:
        with pytest.raises(UnknownSite, match="read it with capture_activations"):
            call()
    with pytest.raises(UnknownSite, match="no site 'pattern'"), attached(model, {(0, "pattern"): lambda value: None}):
        pass


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("source", ["run", "clean"])
def test_an_engine_refuses_it_and_serves_the_others(backend, source, forwards):
    model = tiny("llama", attn_implementation=backend)
    count, engine = forwards(model), Engine(model)
    spec = CaptureSpec(("residual", "pattern"), source=source)
    asked = [Request(tokens=(5, 6, 7), key=(1,), sampling=Sampling(max_new_tokens=2), capture=(spec,))]
    (refused,) = engine.run(asked)
    assert refused.finish_reason == "error" and not refused.records and not count
    assert isinstance(refused.error, UnknownSite) and "capture_activations" in str(refused.error)
    other = Request(tokens=(5, 6, 7), key=(2,), sampling=Sampling(max_new_tokens=2), capture=(CaptureSpec(),))
    refused, served = engine.run([*asked, other])
    assert isinstance(refused.error, UnknownSite) and served.error is None and len(served.records) == 3 and count


def test_a_conversation_refuses_it_before_any_turn(forwards):
    tokenizer = tokenizer_of("qwen3")
    model = tiny("qwen3", vocab_size=len(tokenizer), attn_implementation="eager", eos_token_id=tokenizer.eos_token_id)
    pair, count = (model, tokenizer), forwards(model)
    talk = Conversation.from_models((pair, pair), names=("alice", "bob"), shared_context="Talk.", max_new_tokens=3)
    with pytest.raises(UnknownSite, match="capture_activations"), talk.capture("pattern"):
        talk.step("alice")
    with pytest.raises(UnknownSite, match="capture_activations"):
        talk.add_capture(PATTERN, ActivationCache())
    with pytest.raises(UnknownSite, match="capture_activations"):
        talk.step("alice", capture=(CaptureSpec(), PATTERN))
    with pytest.raises(UnknownSite, match="capture_activations"):
        run([talk], turns=1, capture=(CaptureSpec(), PATTERN))
    assert not count and not talk.capturing and talk.turns_taken == 0
    message = talk.step("alice", capture=CaptureSpec())
    assert count and len(message.records) == 3


def test_who_cannot_be_captured_at_all_says_that_first():
    talk = Conversation((ScriptedParticipant("a", ["x"]), ScriptedParticipant("b", ["y"])), shared_context="Talk.")
    with pytest.raises(UnsupportedIntervention, match="cannot be reached"):
        talk.step("a", capture=PATTERN)
