"""Every site of every family, read and written in one batch, is what it is on the bare model."""

import numpy as np
import pytest
import torch

from interlens.engine.engine import Engine
from interlens.engine.request import Request, Sampling
from interlens.interp import CaptureSpec, RouterSteeringSpec, SteeringSpec, capture_activations
from interlens.interp.locate import layers_with, site_width, sites_of
from interlens.interp.routing import moe_layer_indices, moe_num_experts
from tests.support.reference import direction, model_of, prompt
from tests.support.tiny import FAMILIES, MOE_FAMILIES

NEW = prompt(5, 77)
TIGHT = dict(rtol=1e-3, atol=5e-4)


def request(number, **options):
    options = {"forced": NEW, "logprobs": True, "sampling": Sampling(), **options}
    return Request(tokens=prompt(6 + number % 7, number), key=(number,), **options)


def plain_logprobs(model, asked):
    ids, n = (*asked.tokens, *asked.forced), len(asked.tokens)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, n - 1 : -1].double()
    return torch.log_softmax(logits, -1)[range(len(asked.forced)), list(asked.forced)].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_a_batch_is_read_as_in_one_forward_alone(family):
    model = model_of(family)
    spec = CaptureSpec(sites_of(model))
    asked = [request(i, capture=(spec,)) for i in range(4)]
    for reply, each in zip(Engine(model, chunk=5).run(asked), asked, strict=True):
        alone = capture_activations(model, torch.tensor([(*each.tokens, *NEW)]), spec)
        assert [(r.layer, r.site) for r in reply.records] == [(c.layer, c.site) for c in alone]
        for record, captured in zip(reply.records, alone, strict=True):
            torch.testing.assert_close(record.tensor, captured.tensor, **TIGHT, msg=f"{record.site} {record.layer}")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_a_batch_is_written_as_in_one_forward_alone(family):
    model, asked = model_of(family), []
    for number, site in enumerate(sites_of(model)):
        layer = layers_with(model, site)[-1]
        vector = direction(number, site_width(model, site, layer))
        edits = (SteeringSpec(vector, layer, 1.5, ("add", "norm_add", "ablate", "replace")[number % 4], site),)
        asked.append(request(number, interventions=edits))
    plain = Engine(model).run([request(number) for number in range(len(asked))])
    for reply, each, unedited in zip(Engine(model, chunk=7).run(asked), asked, plain, strict=True):
        site = each.interventions[0].site
        assert reply.error is None, (site, reply.error)
        with each.interventions[0].register(model):
            expected = plain_logprobs(model, each)
        np.testing.assert_allclose(reply.logprobs["logprobs"], expected, **TIGHT, err_msg=site)
        np.testing.assert_allclose(unedited.logprobs["logprobs"], plain_logprobs(model, each), **TIGHT, err_msg=site)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_routers_are_steered_row_by_row(family):
    model = model_of(family)
    layers, experts = moe_layer_indices(model), moe_num_experts(model)
    asked, changed = [], 0
    for number in range(4):
        bias = torch.randn(len(layers), experts, generator=torch.Generator().manual_seed(number))
        edits = (RouterSteeringSpec(bias, layers, 4.0),) if number % 2 else ()
        asked.append(request(number, interventions=edits))
    for reply, each in zip(Engine(model, chunk=4).run(asked), asked, strict=True):
        assert reply.error is None, reply.error
        expected = plain = plain_logprobs(model, each)
        for edit in each.interventions:
            with edit.register(model):
                expected = plain_logprobs(model, each)
            changed += not np.allclose(expected, plain, **TIGHT)
        np.testing.assert_allclose(reply.logprobs["logprobs"], expected, **TIGHT)
    assert changed == 2
