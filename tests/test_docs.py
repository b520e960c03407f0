"""The pages under docs/ are true to the tree they describe: their links lead somewhere, the files they name exist."""

import re
from pathlib import Path

import pytest

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
