"""Pages and plots that are made from the code are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_tools import packages, reference_cli, reference_grpc, reference_http, settings_page
from docs_tools.generate import files
from docs_tools.paths import ROOT

FILES = files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_generated_is_current(path: Path) -> None:
    assert path.exists(), "run `python -m docs_tools.generate`"
    assert path.read_text() == FILES[path], "run `python -m docs_tools.generate`"


def test_every_setting_is_described() -> None:
    assert settings_page.render().count("| `TEMPER_") > 50


def test_every_package_says_what_is_in_it() -> None:
    assert len([packages.purpose(package) for package in packages.packages()]) > 80


def test_references_have_what_users_call() -> None:
    assert "## temper train submit" in reference_cli.render()
    assert "## POST /v1/chat/completions" in reference_http.render()
    assert "### Engine\n" in reference_grpc.render()
    assert "`prompt_token_ids`" in reference_grpc.render()
