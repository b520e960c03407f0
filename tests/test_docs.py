"""The pages under docs/ are true to the tree they describe: their links lead somewhere, the files they name exist."""

import re
from pathlib import Path

import pytest

from tests.test_imports import LAYERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"`((?:interlens|sweeps|conf|tests|docs|benchmarks|examples)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_index_of_examples_names_each_of_them():
    index = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"({path.name})" not in index] == []


@pytest.mark.parametrize("package", LAYERS)
def test_design_has_a_row_for_every_layer(package):
    """The table below "### <package>, low to high" and the law of imports name the same files, in the same order."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = re.split(rf"^### {package}, low to high$", text, flags=re.MULTILINE)[1]
    rows = re.findall(r"^\| `([^`]*)`", re.split(r"^##", section, flags=re.MULTILINE)[0], flags=re.MULTILINE)
    assert tuple(rows) == LAYERS[package]
    there = {path.stem if path.suffix == ".py" else f"{path.name}/" for path in (ROOT / package).iterdir()}
    assert there - {"__init__", "__main__", "__pycache__/", "py.typed/"} == {n for row in rows for n in row.split()}


def test_design_names_only_what_is_there():
    """The table of where things are: every word in its first column is a module or a folder."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `([^`]*)`", text, flags=re.MULTILINE)
    names = {
        name.strip().rstrip("/") for row in rows for name in re.split(r"[,\s]+", row) if name not in ("", "sweeps/")
    }
    for name in names:
        found = [*ROOT.glob(f"interlens/{name}.py"), *ROOT.glob(f"interlens/{name}"), *ROOT.glob(f"sweeps/{name}*")]
        assert found, f"docs/design.md names {name}"


def test_no_page_links_outside_the_repository():
    """A relative link that climbs out leads to a folder that a user does not have."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!\w+:)([^)#]+)", page.read_text()):
            assert (page.parent / target).resolve().is_relative_to(ROOT), f"{page} links to {target}"
