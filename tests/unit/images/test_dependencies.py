"""What the gateway's image will have installed, computed from what is installed here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from images.check import GATEWAY_STRANGERS
from images.contents import GATEWAY_BYTES
from images.project import requirements
from images.sbom import canonical

ROOT = Path(__file__).resolve().parents[3]
PINS = {
    canonical(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    if version
}
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
"""The oldest of each: their markers ask for the most."""


def closure(lines: Iterable[str], python: str) -> set[str]:
    """Canonical names of everything that these requirements bring on Linux with this Python."""
    environment = dict(default_environment()) | {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found: set[tuple[str, str]] = set()
    left = [(Requirement(line), "") for line in lines]
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(environment | {"extra": extra}):
            continue
        name = canonical(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in found:
                continue
            found.add((name, wanted))
            try:
                needs = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # for another Python than this one; that it is pinned is checked by name
            left += [(Requirement(line), wanted) for line in needs]
    return {name for name, _ in found}


def test_the_gateway_is_small_and_has_no_arrays() -> None:
    names = closure(requirements(["gateway"]), PYTHONS[0])
    assert {"fastapi", "grpcio", "uvloop", "urllib3", "pydantic-core"} <= names
    assert not names & set(GATEWAY_STRANGERS)
    total = 0
    for name in names & {canonical(item.name) for item in importlib.metadata.distributions()}:
        for file in importlib.metadata.files(name) or []:
            path = Path(str(file.locate()))
            if path.suffix != ".pyc" and path.is_file():
                total += path.stat().st_size
    # Compiled modules add as much again as there is Python code, which is a quarter of it.
    assert 50_000_000 < total < GATEWAY_BYTES / 1.5


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extras", [("gateway",), ("engine", "gpu")])
def test_everything_that_goes_into_an_image_is_pinned(extras: tuple[str, ...], python: str) -> None:
    names = closure(requirements(extras), python)
    # torch's wheels for GPUs pin NVIDIA's libraries themselves, exactly.
    missing = {name for name in names - PINS.keys() if not name.startswith(("nvidia-", "cuda-"))}
    assert not missing
