# ruff: noqa: E402 (the environment is set before anything is imported)
"""What every test stands on: no hub, one thread, the embedded model, and no hook left behind."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HYDRA_FULL_ERROR"] = "1"
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import gc
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """Tiny models are fastest on one thread, and other processes of the suite want theirs."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield


@pytest.fixture(autouse=True)
def no_hook_left_behind():
    """Fails a test after which a module still carries a forward hook that was registered during it."""
    from torch.utils.hooks import RemovableHandle

    first = RemovableHandle.next_id
    yield
    if RemovableHandle.next_id > first and (left := hooks_since(first)):
        pytest.fail(f"hooks left behind: {', '.join(left)}", pytrace=False)


def hooks_since(first_id: int) -> list[str]:
    """Forward (pre-)hooks with a handle id of `first_id` or later on live modules; transformers keeps its own."""
    from torch import nn

    live = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    found = []
    for module in live:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for handle_id, hook in hooks.items():
                home = getattr(getattr(hook, "func", hook), "__module__", "") or ""
                if handle_id >= first_id and not home.startswith(("transformers.", "accelerate.")):
                    found.append(f"{getattr(hook, '__qualname__', hook)} on {type(module).__name__}")
    return found


@pytest.fixture(scope="session")
def smollm2():
    """The embedded chat model in bfloat16, as `Loaded`."""
    from interlens.loading import load

    return load("smollm2", device="cpu")


@pytest.fixture(scope="session")
def smollm2_float32():
    """The embedded chat model in float32: batched and one by one agree to rounding."""
    from interlens.loading import load

    return load("smollm2", dtype="float32", device="cpu")


def pytest_collection_modifyitems(items):
    if "torch" in sys.modules or any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a GPU"))
