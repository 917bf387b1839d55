"""Contents that an image must have and must not have."""

from __future__ import annotations

import importlib.metadata
import json
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

from images.buildah import ROOT, CheckFailed, Image
from images.finish import INSTALLERS, USER
from images.sbom import canonical

_TOOLS = re.compile(
    r"(pip|easy_install|wheel)[0-9.]*|(.*-)?(gcc|cc|g\+\+|c\+\+|clang|ld|make|cmake|ninja|cargo|rustc)(-[0-9.]+)?"
)
_BINARIES = ("usr/local/bin", "usr/bin", "usr/local/sbin", "usr/sbin", "opt/venv/bin")
_STRANGERS = ("tests", "benchmarks", ".git", "docs", "cli", "images")
_LABELS = ("title", "description", "version", "revision", "created", "source", "licenses")
GATEWAY_BYTES = 250_000_000
"""Most that the gateway's site-packages may take."""


def site_packages(image: Image) -> Path:
    """Directory of the image's installed packages."""
    return next((image.root / "opt/venv/lib").glob("python3*/site-packages"))


def installed(image: Image) -> dict[str, str]:
    """Canonical name → version of every distribution."""
    found = importlib.metadata.distributions(path=[str(site_packages(image))])
    return {canonical(item.name): item.version for item in found}


def size(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())


def check(image: Image, *, forbidden: tuple[str, ...]) -> None:
    """Raises CheckFailed with everything that is wrong.

    Args:
        forbidden: distributions that this image must not have.
    """
    problems = [problem for find in (_tools, _configuration, _bill, _pins, _code, _modes) for problem in find(image)]
    problems += [f"{name} is installed" for name in sorted(installed(image).keys() & set(forbidden))]
    if problems:
        raise CheckFailed(f"{image.name}: " + "; ".join(problems))


def _tools(image: Image) -> Iterator[str]:
    for directory in _BINARIES:
        for path in sorted((image.root / directory).glob("*")):
            if _TOOLS.fullmatch(path.name):
                yield f"/{directory}/{path.name} is there"
    for pattern in ("usr/lib/python3*", "usr/local/lib/python3*", "opt/venv/lib/python3*"):
        for library in (image.root).glob(pattern):
            for place in (library, library / "site-packages", library / "dist-packages"):
                yield from (
                    f"{name} is in /{place.relative_to(image.root)}" for name in INSTALLERS if (place / name).exists()
                )


def _configuration(image: Image) -> Iterator[str]:
    config = image.config
    if config.get("User") != f"{USER}:{USER}":
        yield f"it runs as {config.get('User')}"
    if config.get("WorkingDir") != "/app":
        yield f"it works in {config.get('WorkingDir')}"
    if [*config.get("Entrypoint", [])][:2] != ["python", "-m"]:
        yield f"its entry point is {config.get('Entrypoint')}"
    labels = config.get("Labels") or {}
    yield from (f"label {name} is missing" for name in _LABELS if not labels.get(f"org.opencontainers.image.{name}"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PYTHONPATH"):
        if name in image.env:
            yield f"{name} of the build is left in its environment"


def _bill(image: Image) -> Iterator[str]:
    bill = json.loads((image.root / "app/sbom.cdx.json").read_text())
    purls = [str(component["purl"]) for component in bill["components"]]
    matches = (re.fullmatch(r"pkg:pypi/(.+)@(.+)", purl) for purl in purls)
    listed = {match[1]: unquote(match[2]) for match in matches if match}
    there = installed(image)
    if listed != there:
        yield f"the bill of materials and what is installed differ: {sorted(listed.items() ^ there.items())}"
    if not any(purl.startswith("pkg:deb/") for purl in purls):
        yield "the bill of materials has none of Debian's packages"


def _pins(image: Image) -> Iterator[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    for name, version in sorted(installed(image).items()):
        # A local version (2.13.0+cpu) is the same release, built otherwise.
        if name != "temper" and pins.get(name) != version.partition("+")[0]:
            yield f"{name} {version} is not what constraints.txt pins ({pins.get(name)})"


def _code(image: Image) -> Iterator[str]:
    app = image.root / "app"
    yield from (f"/app/{name} is there" for name in _STRANGERS if (app / name).exists())
    for path in app.rglob("*.py"):
        if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc")):
            yield f"/{path.relative_to(image.root)} is not compiled"


def _modes(image: Image) -> Iterator[str]:
    trees: list[Callable[[], Iterator[Path]]] = [
        lambda: (image.root / "app").rglob("*"),
        lambda: (image.root / "opt").rglob("*"),
    ]
    for paths in trees:
        for path in paths():
            status = path.lstat()
            mode = status.st_mode
            if stat.S_ISLNK(mode):
                continue
            if status.st_uid != 0 or mode & 0o022:
                yield f"/{path.relative_to(image.root)} can be changed by others than root"
            if not mode & 0o004:
                yield f"/{path.relative_to(image.root)} cannot be read"
