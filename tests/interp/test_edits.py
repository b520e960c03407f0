"""Laws of steering, patching and capture on bare models."""

import numpy as np
import pytest
import torch

from interlens.errors import UnknownSite
from interlens.interp import (
    ActivationRecord,
    CaptureSpec,
    Intervention,
    Patch,
    Select,
    SteeringSpec,
    capture_activations,
    registered,
)
from interlens.interp.locate import layers_with, num_layers, site_width, sites_of
from interlens.interp.select import TokenSequence
from tests.support.tiny import FAMILIES, tiny, token_ids


def direction(width=32, seed=0):
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def numpy_edit(mode, h, d, coef):
    h, d = h.double().numpy(), d.double().numpy()
    unit = d / np.linalg.norm(d)
    along = h @ unit
    return {
        "add": h + coef * d,
        "ablate": h - coef * along[:, None] * unit,
        "norm_add": h + coef * np.linalg.norm(h, axis=-1, keepdims=True) * unit,
        "replace": h + (coef - along)[:, None] * unit,
    }[mode]


@pytest.mark.parametrize("mode", ["add", "ablate", "norm_add", "replace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_modes_equal_numpy(mode, dtype):
    spec = SteeringSpec(direction(), (1,), 2.5, mode)
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    result = spec.edit(hidden, spec.parameters(1, np.arange(7)))
    assert result.dtype == dtype
    expected = torch.from_numpy(numpy_edit(mode, hidden, direction(), 2.5))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * 4)


def test_rows_of_several_specs_edit_together_as_alone():
    hidden = torch.randn(3, 32)
    for mode in ("add", "ablate", "norm_add", "replace"):
        specs = [SteeringSpec(direction(seed=i), (1,), float(i - 1), mode) for i in range(3)]
        assert len({spec.edit_key for spec in specs}) == 1
        parameters = [spec.parameters(1, np.array([4])) for spec in specs]
        together = {name: torch.cat([p[name] for p in parameters]) for name in parameters[0]}
        alone = torch.cat([s.edit(hidden[i : i + 1], parameters[i]) for i, s in enumerate(specs)])
        torch.testing.assert_close(specs[0].edit(hidden, together), alone, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_coef_zero_and_patching_a_run_with_itself_change_nothing(family):
    model, ids = tiny(family), token_ids(1)
    plain = model(ids).logits
    for site in sites_of(model):
        layer = layers_with(model, site)[-1]
        spec = SteeringSpec(direction(site_width(model, site, layer)), layer, 0.0, site=site)
        own = capture_activations(model, ids, CaptureSpec((site,), (layer,)))[0].tensor
        patch = Patch(own[[0, 3, 11]], layer, (0, 3, -1), site)
        for edit in (spec, patch):
            assert isinstance(edit, Intervention)
            with edit.register(model):
                assert registered(model)
                torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0, msg=site)
    assert not registered(model)
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)


def test_steering_acts_at_its_layer_and_tokens_only():
    model, ids = tiny("llama"), token_ids(1)
    before = capture_activations(model, ids, CaptureSpec())
    spec = SteeringSpec(direction(), 1, 2.0, tokens=Select.positions(4, -2))
    with spec.register(model):
        after = capture_activations(model, ids, CaptureSpec())
    expected = before[1].tensor.clone()
    expected[[4, 10]] += 2.0 * direction()
    torch.testing.assert_close(after[0].tensor, before[0].tensor, rtol=0, atol=0)
    torch.testing.assert_close(after[1].tensor, expected, rtol=0, atol=0)
    torch.testing.assert_close(after[2].tensor[:4], before[2].tensor[:4], rtol=0, atol=0)
    assert not torch.allclose(after[2].tensor[4:], before[2].tensor[4:])


def test_registered_edits_know_positions_in_left_padded_generation():
    model = tiny("llama")
    prompts = [token_ids(1, 6, seed=1), token_ids(1, 9, seed=2)]
    spec = SteeringSpec(direction(), (0, 2), 4.0, tokens=Select.window(-2, 6) | Select.generated())
    options = dict(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with spec.register(model):
        alone = [model.generate(p, **options)[0, p.shape[1] :] for p in prompts]
        batch = torch.zeros(2, 9, dtype=torch.long)
        batch[0, 3:], batch[1] = prompts[0], prompts[1]
        mask = torch.ones_like(batch)
        mask[0, :3] = 0
        together = model.generate(batch, attention_mask=mask, **options)[:, 9:]
    assert torch.equal(together, torch.stack(alone))
    assert not torch.equal(together[0], model.generate(prompts[0], **options)[0, 6:])


def test_patches_come_before_steering_and_a_patch_overwrites():
    model, ids = tiny("gpt2"), token_ids(1)
    values = torch.randn(2, 32)
    from interlens.interp import register

    with register(model, [SteeringSpec(direction(), 1, 1.0), Patch(values, 1, (2, 5))]):
        seen = capture_activations(model, ids, CaptureSpec(layers=(1,)))[0].tensor
    torch.testing.assert_close(seen[[2, 5]], values + direction(), rtol=0, atol=0)


def test_directions_that_cannot_work_are_refused():
    for bad, why in [
        (torch.zeros(32), "zero"), (torch.full((32,), float("nan")), "finite"), (torch.ones(2, 32), r"\[D\]"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=why):
            SteeringSpec(bad, 1)
    model = tiny("llama")
    with pytest.raises(ValueError, match="31 values does not fit 'residual', which is 32"):
        SteeringSpec(torch.ones(31), 1).register(model)
    with pytest.raises(UnknownSite, match="0 to 2"):
        SteeringSpec(torch.ones(32), 9).register(model)
    with pytest.raises(ValueError, match="mode 'bump'; possible: add"):
        SteeringSpec(torch.ones(32), 1, mode="bump")
    with pytest.raises(ValueError, match="names layer 2, but the layers given are"):
        SteeringSpec(torch.ones(32), 1, site="blocks.2.hook_resid_post")
    with pytest.raises(ValueError, match="needs a conversation"):
        SteeringSpec(torch.ones(32), 1, tokens=Select.phase("answer")).register(model)
    with pytest.raises(ValueError, match="lies before a prompt of 3"):
        Patch(torch.ones(1, 32), 1, (-4,)).required_positions(3)
    assert not registered(model)


def test_fingerprint_covers_everything_and_files_keep_it(tmp_path):
    base = dict(direction=direction(), layers=(1, 2), coef=2.0, mode="ablate", site="mlp", tokens=Select.generated(1))
    spec = SteeringSpec(**base)
    changes = [
        dict(direction=direction(seed=1)), dict(layers=(1,)), dict(coef=3.0), dict(mode="add"), dict(site="attn"),
        dict(tokens=Select.all()), dict(direction={1: direction(), 2: direction(seed=2)}),
    ]  # fmt: skip
    prints = {spec.fingerprint} | {SteeringSpec(**{**base, **change}).fingerprint for change in changes}
    assert len(prints) == 1 + len(changes)
    assert SteeringSpec(**{**base, "direction": direction().double()}) == spec
    for name, each in [("one", spec), ("many", SteeringSpec(**{**base, **changes[-1]}))]:
        each.save(tmp_path / name, provenance={"run": "x"})
        assert SteeringSpec.load(tmp_path / name) == each


def test_difference_of_means_equals_numpy():
    pos, neg = torch.randn(9, 32) + 1, torch.randn(5, 32)
    expected = pos.double().numpy().mean(0) - neg.double().numpy().mean(0)
    spec = SteeringSpec.difference_of_means(pos.bfloat16().float(), neg.bfloat16().float(), (0,))
    assert abs(float(spec.direction.norm()) - 1) < 1e-6
    spec = SteeringSpec.difference_of_means(pos, neg, 0)
    np.testing.assert_allclose(spec.direction.numpy(), expected / np.linalg.norm(expected), atol=1e-6)
    with pytest.raises(ValueError, match="zero"):
        SteeringSpec.difference_of_means(pos, pos, 0)


def test_patch_from_record_takes_the_rows_it_names():
    record = ActivationRecord(
        "bob", 3, 1, "residual", torch.arange(6.0)[:, None].expand(6, 32), (3, 6), {"prompt": (0, 3), "answer": (3, 6)},
        tokens=(5, 6, 7, 8, 9, 10), positions=(4, 5, 6, 9, 10, 11),
    )  # fmt: skip
    patch = Patch.from_record(record, tokens=Select.phase("answer"))
    assert patch.positions == (9, 10, 11) and patch.activations[:, 0].tolist() == [3, 4, 5]
    assert Patch.from_record(record, tokens=Select.prompt(), shift=2).positions == (6, 7, 8)
    assert Patch.from_record(record, tokens=Select.positions(-3, 10)).positions == (6, 10)
    with pytest.raises(ValueError, match="selects no row"):
        Patch.from_record(record, tokens=Select.phase("reasoning"))


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_capture_equals_one_by_one(family):
    model = tiny(family)
    ids, mask = token_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, 9:], mask[2, [2, 7]] = 0, 0, 0
    spec = CaptureSpec(sites=sites_of(model), tokens=Select.all())
    padded = capture_activations(model, ids, spec, mask)
    for row in range(3):
        alone = capture_activations(model, ids[row][mask[row].bool()][None], spec)
        assert [(c.layer, c.site) for c in alone] == [(c.layer, c.site) for c in padded]
        for one, many in zip(alone, padded, strict=True):
            torch.testing.assert_close(many.tensor[row], one.tensor, rtol=1e-4, atol=1e-5)


def test_capture_shapes_order_and_pooling():
    model, ids = tiny("mixtral"), token_ids(2)
    captured = capture_activations(model, ids, CaptureSpec(("mlp", "residual"), (2, 0)))
    assert [(c.layer, c.site) for c in captured] == [(0, "mlp"), (0, "residual"), (2, "mlp"), (2, "residual")]
    assert captured[0].tensor.shape == (2, 12, 32)
    full = captured[1].tensor
    pooled = capture_activations(model, ids, CaptureSpec(layers=0, tokens=Select.window(-4, 12), pool="mean"))[0].tensor
    torch.testing.assert_close(pooled[:, 0], full[:, 8:].mean(1))
    logits = capture_activations(model, ids[:1], CaptureSpec("logits"))[0]
    torch.testing.assert_close(logits.tensor, model(ids[:1]).logits[0], rtol=1e-4, atol=1e-5)
    assert logits.layer == num_layers(model) - 1
    with pytest.raises(ValueError, match="selects none of 12"):
        capture_activations(model, ids, CaptureSpec(tokens=Select.generated()))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("all", Select.all()),
        ("answer | window(0, 8, of=generated) - special",
         (Select.phase("answer") | Select.window(0, 8, "generated")) - Select.special()),
        ("prompt - (message(2) | positions(3, -4))", Select.prompt() - (Select.message(2) | Select.positions(3, -4))),
        ("generated(lead=1) | branch | reasoning", Select.generated(1) | Select.branch() | Select.phase("reasoning")),
        ("phase(answer)", Select.phase("answer")),
    ],
)  # fmt: skip
def test_selections_are_written_as_text(text, expected):
    assert Select.parse(text) == expected
    assert Select.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "answr", "answer |", "window(1", "window(5, 2)", "all all", "positions(x)", "(all", "all()()"]
)
def test_a_selection_that_is_no_selection_is_refused(text):
    with pytest.raises(ValueError):
        Select.parse(text)


def test_prompt_and_generated_tile_the_sequence():
    sequence = TokenSequence([5, 6, 7])
    for token in (8, 9):
        sequence.append(token)
    assert (Select.prompt().mask(sequence) ^ Select.generated().mask(sequence)).all()
