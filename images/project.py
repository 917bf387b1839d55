"""pyproject.toml for image builds: what a service needs, and Temper's own metadata.

`python -m images.project requirements EXTRA...` prints requirements for pip; `python -m images.project metadata SITE
EXTRA...` writes Temper's dist-info into a site-packages directory. The code itself is copied, one service an image, so
there is no wheel to install that would bring it. Only the standard library: this runs before anything is installed.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def project() -> dict[str, Any]:
    """The table [project]."""
    table: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return table


def requirements(extras: Sequence[str]) -> list[str]:
    """Requirement lines of all services and of these extras.

    Raises:
        SystemExit: there is no such extra.
    """
    table = project()
    known = table["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            raise SystemExit(f"pyproject.toml has no extra {extra!r}: it has {', '.join(sorted(known))}")
    return sorted({*table["dependencies"], *(line for extra in extras for line in known[extra])})


def write_metadata(site: Path, extras: Sequence[str]) -> Path:
    """Makes importlib.metadata know Temper (services/common/telemetry/process.py), with what this image needs of
    others."""
    table = project()
    directory = site / f"{table['name']}-{table['version']}.dist-info"
    directory.mkdir()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {table['name']}",
        f"Version: {table['version']}",
        f"Summary: {table['description']}",
        f"License-Expression: {table['license']}",
        f"Requires-Python: {table['requires-python']}",
        *(f"Requires-Dist: {line}" for line in requirements(extras)),
    ]
    (directory / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "INSTALLER").write_text("image\n", encoding="utf-8")
    return directory


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["requirements", *extras] if extras:
            sys.stdout.write("\n".join(requirements(extras)) + "\n")
        case ["metadata", site, *extras] if extras:
            write_metadata(Path(site), extras)
        case _:
            sys.stderr.write("usage: python -m images.project requirements EXTRA... | metadata SITE EXTRA...\n")
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
