"""The documentation as a site: it builds without a warning, and a browser needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from doc_examples import ROOT

pytestmark = pytest.mark.install


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "site"


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    """No script, style, font or picture; links that a reader clicks are another matter."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//[^\"]*", text), page.name
        assert not re.findall(r"<link[^>]+(?:stylesheet|preconnect|icon)[^>]+href=\"(?:https?:)?//[^\"]*", text), (
            page.name
        )


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("tutorial", "100000 invoices for 100000 orders"),
        ("reference-commands", "semel inspect transactions"),
        ("reference-api", "semel.write_stream"),
        ("reference-settings", "transactional.id"),
        ("reference-errors", "semel.CommitUnknown"),
        ("reference-metrics", "semel_relay_retries_total"),
        ("how-it-works", "diagrams/sink.svg"),
    ],
)
def test_a_page_is_there_and_full(site: Path, page: str, says: str) -> None:
    """Also those that are made from the code."""
    assert says in (site / f"{page}.html").read_text()


def test_the_search_knows_the_pages_and_no_mark_of_a_test_is_left(site: Path) -> None:
    """Readers see neither the comments of the examples nor links out of the site."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert {"tutorial.html", "comparison.html", "reference-api.html"} <= {
        one["location"].partition("#")[0] for one in index["docs"]
    }
    for page in site.glob("*.html"):
        assert "<!-- example:" not in page.read_text(), page.name
    assert not (site / "design.html").exists()
