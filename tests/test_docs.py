"""What the pages say: their links lead somewhere, their code is code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "benchmarks" / "results")
    for page in folder.glob("*.md")
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text("utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_python(page: Path) -> None:
    for code in _CODE.findall(page.read_text("utf-8")):
        compile(code, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert not re.search(r"@@|TODO|FIXME|TBD", page.read_text("utf-8"))


def test_the_checks_see_pages() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert len(_LINK.findall(text)) > 5
    assert len(_CODE.findall(text)) > 2
