"""The checks that guard all other tests do see what they guard against."""

from pathlib import Path

from torch import nn

from tests.conftest import hooks_left

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parent.parent


def look(*anything):
    """A hook that changes nothing."""


def test_a_left_hook_is_seen_and_a_removed_one_is_not():
    model = nn.Sequential(nn.Linear(2, 2))
    handles = [model[0].register_forward_hook(look), model.register_forward_pre_hook(look)]
    assert hooks_left() == ["look", "look"]
    for handle in handles:
        handle.remove()
    assert hooks_left() == []


def test_a_test_that_leaves_a_hook_fails(pytester):
    """The whole guard, in a session of its own."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(
        """
        from torch import nn

        kept = nn.Linear(2, 2)

        def test_leaves():
            kept.register_forward_hook(lambda *a: None)

        def test_tidies():
            kept.register_forward_hook(lambda *a: None).remove()

        def test_forgets_the_module_too():
            nn.Linear(2, 2).register_forward_hook(lambda *a: None)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*hooks left behind: test_leaves*"])


def test_no_test_can_reach_a_hub():
    from huggingface_hub import constants

    assert constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE
