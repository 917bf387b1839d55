"""Documentation that can go stale, checked where that is cheap."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer

from cli.main import app
from cli.output import ExitCode
from docs_tools.links import broken_links
from docs_tools.paths import ROOT, pages

PAGES = [*pages(), ROOT / "benchmarks" / "NOTES.md"]
COMMAND = re.compile(r"temper ((?:[a-z]+ ?)+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@cache
def commands() -> frozenset[str]:
    """Every command as it is typed, without "temper"."""
    group = typer.main.get_command(app)
    found = set()
    for name, command in getattr(group, "commands", {}).items():
        found.add(name)
        found.update(f"{name} {sub}" for sub in getattr(command, "commands", {}))
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    known = commands()
    code = re.findall(r"`([^`\n]+)`|^(temper .+)$", page.read_text(), re.MULTILINE)
    wrong = []
    for quoted, line in code:
        match = COMMAND.match(quoted or line)
        if match is None:
            continue
        words = match.group(1).split()
        if words[0] not in known or (
            words[0] in ("train", "adapters", "sessions") and len(words) > 1 and " ".join(words[:2]) not in known
        ):
            wrong.append(quoted or line)
    assert not wrong


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()))
    known = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert targets <= {line.split()[0] for line in known.splitlines()}


def test_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "guides" / "operations.md").read_text()
    assert all(f"| {int(code)} |" in page for code in ExitCode)


RIDDLE = re.compile(r"^(?!#|.*\?)(?:[-*|] |\d+\. )?(?:.*[.:;] )?(?:What|Who|Whoever|Whatever) [a-z].*$", re.MULTILINE)
WRITTEN = [page for page in PAGES if page.parent.name in ("decisions", "guides", "training", "tutorials", "docs")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_name_their_subject(page: Path) -> None:
    """ "A file that is gone …", not "What is gone …": a reader learns first of what a sentence speaks."""
    text = page.read_text()
    if "<!-- Written by" not in text:
        assert RIDDLE.findall(text) == []


CODE = re.compile(
    r"\b(?:services|kernels|cli|benchmarks|tests|observability|docs_tools|images|proto)/[\w./-]+\.(?:py|proto)\b"
)
MODULE = re.compile(r"python -m ((?:services|cli|benchmarks|tests|observability|docs_tools|images)(?:\.\w+)*)")
CURRENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "NOTES.md")]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    modules = [Path(*name.split(".")) for name in MODULE.findall(text)]
    gone = [path for path in CODE.findall(text) if not (ROOT / path).exists()]
    gone += [str(path) for path in modules if not (ROOT / path / "__main__.py").exists() and not _is_module(path)]
    assert gone == []


def _is_module(path: Path) -> bool:
    return (ROOT / path).with_suffix(".py").exists()
