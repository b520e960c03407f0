"""The grammar of contrasts and filters: what it means, what it refuses, and that it never evaluates anything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.aggregates.expressions import parse, parse_contrast

ROW = {"framing": "warm", "intervention.coef": 4.0, "item": "rain", "ok": True, "none": None, "turn": 3}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("framing == 'warm'", True),
        ('framing == "warm"', True),
        ("framing != 'warm'", False),
        ("intervention.coef == 4", True),
        ("intervention.coef > 3.5 and turn <= 3", True),
        ("intervention.coef < -1e3", False),
        ("turn == '3'", False),
        ("framing in ['cold', 'warm']", True),
        ("framing not in ['cold', 'warm']", False),
        ("turn in []", False),
        ("not framing == 'cold' and ok", True),
        ("not (framing == 'warm' or ok)", False),
        ("framing == 'cold' or framing == 'warm' and turn == 9", False),
        ("none == null", True),
        ("none < 3", False),
        ("ok == true", True),
        ("ok == 1", False),
        ("item > 'a'", True),
        ("item > 1", False),
    ],
)
def test_meaning(source, expected):
    assert parse(source)(ROW) is expected


def test_texts_may_hold_anything():
    assert parse(r"item == 'it\'s (a) vs b == c'")({"item": "it's (a) vs b == c"})
    assert parse("item == '日本 \"x\"'")({"item": '日本 "x"'})


@given(st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_every_text_survives_quoting(text):
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    assert parse(f"item == '{quoted}'")({"item": text})


def test_a_contrast_has_two_sides_and_the_rest_is_neither():
    contrast = parse_contrast("framing == 'warm' and turn > 2 vs framing == 'cold'")
    assert contrast.side(ROW) == "pos"
    assert contrast.side({**ROW, "framing": "cold"}) == "neg"
    assert contrast.side({**ROW, "turn": 1}) is None
    assert contrast.names == {"framing", "turn"}
    assert contrast.positive.source == "framing == 'warm' and turn > 2"
    with pytest.raises(ValueError, match="both sides"):
        parse_contrast("turn > 2 vs ok").side(ROW)


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("", "an expression is a text"),
        ("framing = 'warm'", "cannot read"),
        ("framing == warm", "texts need quotes"),
        ("framing == ", "ends too early"),
        ("framing == 'warm' framing", "cannot read the rest"),
        ("(framing == 'warm'", r"expected '\)'"),
        ("'warm' == framing", "expected a column name"),
        ("framing in 'warm'", r"expected '\['"),
        ("__import__('os').system('x')", "cannot read"),
        ("framing == 'warm' vs framing == 'cold'", "cannot read the rest"),
        ("f(x)", "cannot read the rest"),
        ("x ** 2", "cannot read"),
        ("and == 3", "expected a column name"),
    ],
)
def test_nonsense_is_refused_and_says_where(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(source)


def test_unknown_columns_list_the_known_ones():
    with pytest.raises(KeyError, match="there are: a, b"):
        parse("c == 1")({"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"no column 'framing'.*there are: coef"):
        parse("framing == 'warm'").check(["coef"])
