# ruff: noqa: E402 (the environment is set before anything is imported)
"""What every test stands on: no hub, one thread, the embedded model, and no hook left behind."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HYDRA_FULL_ERROR"] = "1"
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
    # one token for every cluster of the session, in a folder of its own: a process reads it once and keeps it
    _secrets = tempfile.TemporaryDirectory(prefix="ray-token-")
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = os.path.join(_secrets.name, "token")
    with open(os.environ["RAY_AUTH_TOKEN_PATH"], "w") as _token:
        _token.write(os.urandom(32).hex())
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """Tiny models are fastest on one thread, and other processes of the suite want theirs."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield


@pytest.fixture(scope="session", autouse=True)
def hooks_are_noted():
    """Every hook that torch hands a handle for is noted, so that what is left of them can be asked cheaply."""
    from torch.utils.hooks import RemovableHandle

    plain = RemovableHandle.__init__

    def noting(self, hooks_dict, **options):
        plain(self, hooks_dict, **options)
        NOTED.append((self.hooks_dict_ref, self.id))

    RemovableHandle.__init__ = noting
    yield
    RemovableHandle.__init__ = plain


@pytest.fixture(autouse=True)
def no_hook_left_behind(hooks_are_noted):
    """Fails a test after which a live module still carries a hook that was registered during it."""
    NOTED.clear()
    yield
    if left := hooks_left():
        pytest.fail(f"hooks left behind: {', '.join(left)}", pytrace=False)


ON_THE_CLUSTER = ("tests/sweeps/driver/test_faults.py", "tests/sweeps/driver/test_ray.py")


NOTED: list = []
"""(weak reference to a module's hooks, handle id) of every hook registered since the test began."""


def hooks_left() -> list[str]:
    """Noted hooks that are still there; what transformers and accelerate keep on a model is their business."""
    left = []
    for reference, handle_id in NOTED:
        hook = (reference() or {}).get(handle_id)
        home = getattr(getattr(hook, "func", hook), "__module__", "") or ""
        if hook is not None and not home.startswith(("transformers.", "accelerate.")):
            left.append(getattr(hook, "__qualname__", repr(hook)))
    return left


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Two processes share the suite, a file at a time; those that share a Ray cluster go to one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "cluster" if file in ON_THE_CLUSTER else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    """The longest first."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in ON_THE_CLUSTER)
    if "torch" in sys.modules or any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a GPU"))
