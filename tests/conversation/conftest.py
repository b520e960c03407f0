import pytest


@pytest.fixture(scope="session")
def smol():
    """The embedded model's tokenizer, without its weights."""
    from transformers import AutoTokenizer

    from interlens.dequantise import converted
    from interlens.sources import EMBEDDED, embedded_file

    assert "smollm2" in EMBEDDED
    return AutoTokenizer.from_pretrained(converted(embedded_file("smollm2"), label="smollm2"))
