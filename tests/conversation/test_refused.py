"""What a conversation cannot do is refused where it is asked for, not at the step that would have done it."""

import pytest

from interlens import APIParticipant, AutoModelParticipant, Conversation, ModelParticipant
from interlens.errors import UnknownSite
from interlens.loading import unload
from tests.support import tokenizers
from tests.support.tiny import tiny
from tests.support.unchecked import unchecked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tokenizers.make(tokenizers.CHATML, eos="<|im_end|>", special=("<|im_start|>",))
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    yield str(path)
    unload(str(path))


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(("asked", "said"), [
    ({"layers": [9]}, "no layer 9: this model has 3 layers, 0 to 2"),
    ({"sites": ["router"]}, "no site 'router' for 'llama'; it has: embed, "),
])  # fmt: skip
def test_an_impossible_capture_is_refused_on_entry(folder, asked, said, is_loaded):
    conversation = Conversation.from_models((folder, folder))
    if is_loaded:
        assert conversation.participant("a").num_layers == 3
    with pytest.raises(UnknownSite, match=said), conversation.capture(**asked):
        raise AssertionError("the block was entered")
    assert conversation.capturing == []
    assert conversation.participant("a").weights.is_loaded == is_loaded, "asking loads nothing"


@pytest.mark.parametrize(("option", "said"), [
    ({"max_new_tokens": 0}, "a: max_new_tokens is 0; it must be at least 1"),
    ({"temperature": -1}, "a: temperature is -1; it must be a finite number of at least 0"),
    ({"temperature": float("nan")}, "a: temperature is nan"),
    ({"top_p": 0}, r"a: top_p is 0; it must lie in \(0, 1\]"),
    ({"top_k": 0}, "a: top_k is 0; it must be at least 1"),
])  # fmt: skip
def test_impossible_sampling_is_refused_when_the_participant_is_made(folder, option, said):
    with pytest.raises(ValueError, match=said):
        Conversation.from_models((folder, folder), **option)
    if "top_k" not in option:
        with pytest.raises(ValueError, match=said):
            APIParticipant("a", "some-model", **option)


def test_a_misspelt_option_names_the_nearest_and_all(folder):
    said = r"no option 'temprature'; did you mean 'temperature'\? possible: adapter, .*top_p"
    for make in (
        lambda **options: Conversation.from_models((folder, folder), **options),
        lambda **options: AutoModelParticipant.from_pretrained(folder, name="a", **options),
        lambda **options: AutoModelParticipant.from_model(object(), object(), name="a", **options),
    ):
        with pytest.raises(TypeError, match=said):
            make(temprature=1)
    with pytest.raises(TypeError, match=r"no option 'shared_contxt'; did you mean 'shared_context'\?"):
        Conversation.from_models((folder, folder), shared_contxt="Hello")
    made = AutoModelParticipant.from_pretrained(folder, name="a", load_options={"dtype": "float32"})
    assert isinstance(made, ModelParticipant)


def test_impossible_turns_rows_and_models_are_refused(folder):
    conversation = Conversation.from_models((folder, folder))
    before = list(conversation.transcript)
    for ask, kind, said in (
        (lambda: conversation.run(turns=-1), ValueError, "turns is -1"),
        (lambda: conversation.run(turns=1.5), ValueError, "turns is 1.5; it must be a whole number"),
        (lambda: conversation.step("a", max_new_tokens=0), ValueError, "max_new_tokens is 0; it must be at least 1"),
        (lambda: conversation.sample("a", 3), TypeError, "a text or a Message, not 3"),
        (lambda: conversation.rollout(0, turns=1), ValueError, "n is 0; it must be at least 1"),
        (lambda: conversation.rollout(data=[{"x": 1}, 2], turns=1), TypeError, "row 1 of data is no mapping"),
        (lambda: Conversation.from_models((3,)), TypeError, "a model is a name, a folder"),
    ):
        with unchecked(), pytest.raises(kind, match=said):
            ask()
    assert list(conversation.transcript) == before
