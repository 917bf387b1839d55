"""Pages and plots that are made from the code are current."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from docs_tools import packages, reference_cli, reference_grpc, reference_http, settings_page
from docs_tools.generate import files
from docs_tools.paths import ROOT


@pytest.fixture(scope="module")
def generated() -> Mapping[Path, str]:
    return files()


def test_what_is_generated_is_current(generated: Mapping[Path, str]) -> None:
    assert len(generated) > 6
    stale = [
        str(path.relative_to(ROOT)) for path, text in generated.items() if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run `python -m docs_tools.generate`"


def test_every_setting_is_described(generated: Mapping[Path, str]) -> None:
    assert generated[settings_page.TARGET].count("| `TEMPER_") > 50


def test_every_package_says_what_is_in_it() -> None:
    assert len([packages.purpose(package) for package in packages.packages()]) > 80


def test_references_have_what_users_call(generated: Mapping[Path, str]) -> None:
    assert "## temper train submit" in generated[reference_cli.TARGET]
    assert "## POST /v1/chat/completions" in generated[reference_http.TARGET]
    assert "### Engine\n" in generated[reference_grpc.TARGET]
    assert "`prompt_token_ids`" in generated[reference_grpc.TARGET]
