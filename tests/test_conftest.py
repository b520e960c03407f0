"""The checks that guard all other tests do see what they guard against."""

import torch
from torch import nn

from .conftest import hooks_since


def test_a_left_hook_is_seen_and_a_removed_one_is_not():
    first = torch.utils.hooks.RemovableHandle.next_id
    model = nn.Sequential(nn.Linear(2, 2))
    handles = [model[0].register_forward_hook(print), model.register_forward_pre_hook(print)]
    assert len(hooks_since(first)) == 2
    for handle in handles:
        handle.remove()
    assert hooks_since(first) == []


def test_no_test_can_reach_a_hub():
    from huggingface_hub import constants

    assert constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE
