"""What contributors run: the compose file of the stores, hooks, indexes of pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from docs_tools.links import linked
from docs_tools.paths import DOCS, ROOT


def test_compose_starts_the_stores_of_the_chart() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    values = yaml.safe_load((ROOT / "charts" / "temper" / "values.yaml").read_text())
    for service, part in (("valkey", "redis"), ("s3", "objectStore")):
        image = values[part]["image"]
        assert services[service]["image"] == f"{image['repository']}:{image['tag']}"
        assert all(port.startswith("127.0.0.1:") for port in services[service]["ports"])


def test_hooks_run_what_is_there() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for hook in config["repos"][0]["hooks"]:
        words = hook["entry"].split()
        for word in words:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), hook["id"]
        if "-m" in words and "." in (module := words[words.index("-m") + 1]):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), hook["id"]


@pytest.mark.parametrize(
    ("index", "pages"),
    [
        ("README.md", [*DOCS.glob("*.md"), *DOCS.glob("guides/**/*.md"), *DOCS.glob("tutorials/*.md")]),
        ("decisions/README.md", list(DOCS.glob("decisions/*.md"))),
    ],
)
def test_an_index_has_every_page(index: str, pages: list[Path]) -> None:
    found = linked(DOCS / index)
    missing = [page for page in pages if page.name != "README.md" and page not in found]
    assert missing == []


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = (
        *DOCS.glob("*.md"),
        *DOCS.glob("guides/**/*.md"),
        *DOCS.glob("tutorials/*.md"),
        *DOCS.glob("reference/*.md"),
    )
    assert [page for page in pages if f"- {page.relative_to(DOCS)}\n" not in nav] == []


def test_the_glossary_stays_short() -> None:
    words = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(words) - 1 <= 30
