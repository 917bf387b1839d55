"""Writes the pages and plots that are made from the code: `python -m docs_tools.generate [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from docs_tools import card_tables, doctor_page, packages, reference_cli, reference_grpc, reference_http, settings_page
from docs_tools.paths import ROOT
from docs_tools.plots import plots


def files() -> Mapping[Path, str]:
    """Everything that is written."""
    return {
        settings_page.TARGET: settings_page.render(),
        packages.ARCHITECTURE: packages.with_tree(packages.ARCHITECTURE.read_text()),
        packages.MAP: packages.whole_map(),
        reference_cli.TARGET: reference_cli.render(),
        reference_grpc.TARGET: reference_grpc.render(),
        reference_http.TARGET: reference_http.render(),
        card_tables.SIZING: card_tables.sizing(card_tables.SIZING.read_text()),
        card_tables.CARDS_PAGE: card_tables.cards(card_tables.CARDS_PAGE.read_text()),
        doctor_page.TARGET: doctor_page.with_checks(doctor_page.TARGET.read_text()),
        **plots(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is not current")
    check = parser.parse_args().check
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not current: run `python -m docs_tools.generate`\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
