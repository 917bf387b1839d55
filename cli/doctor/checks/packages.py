"""Python and the packages of this installation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.resources import files
from typing import cast

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place

_EVERYWHERE = ("", "cli")
_SERVER = ("gateway", "engine", "local")
"""Extras without which `temper up` does not run; the client commands need none of them."""
_NAMED = 4
"""Most packages that a sentence names."""


def python(_: Place) -> Finding:
    """The version of Python is one that Temper is tested with."""
    here = ".".join(map(str, sys.version_info[:3]))
    wanted = SpecifierSet(_metadata().get("Requires-Python") or "")
    if here in wanted:
        return ok(f"Python {here}")
    return failure(f"this is Python {here}, Temper needs {wanted}", "make a virtual environment with another Python")


def required(_: Place) -> Finding:
    """Every package that Temper asks for is there, in a version that it accepts."""
    wrong = list(_wrong(_EVERYWHERE))
    if wrong:
        return failure(f"packages are missing or unfit: {_list(wrong)}", f"pip install {_words(wrong)}")
    wrong = list(_wrong(_SERVER))
    if wrong:
        return warning(
            f"`temper up` cannot run here, packages are missing or unfit: {_list(wrong)}",
            "pip install 'temper[gateway,engine,local]' for a server; client commands need none of them",
        )
    return ok("every package that Temper asks for is there")


def pinned(_: Place) -> Finding:
    """Installed packages have the versions that passed the tests together (constraints.txt)."""
    pins = files("cli.doctor") / "constraints.txt"
    if not pins.is_file():
        raise NotHere("this installation came without constraints.txt")
    other, same = [], 0
    for line in pins.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pin = Requirement(text)
        found = _installed(pin.name)
        if found is None or (pin.marker is not None and not pin.marker.evaluate()):
            continue
        if pin.specifier.contains(found, prereleases=True):
            same += 1
        else:
            other.append(f"{pin.name} {found} (tested: {str(pin.specifier).lstrip('=')})")
    if other:
        return warning(
            f"{len(other)} packages have other versions than those that passed the tests together: {_list(other)}",
            f"pip install -c {pins} 'temper[gateway,engine,cli,local]'",
        )
    return ok(f"{same} packages have the versions that passed the tests together")


def _wrong(extras: tuple[str, ...]) -> Iterator[str]:
    for text in _metadata().get_all("Requires-Dist") or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if wanted.marker is None and "" not in extras:
            continue
        found = _installed(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name}{wanted.specifier}" + (f" (there is {found})" if found else "")


def _metadata() -> Message:
    try:
        # A message of the email package, which has get(), on every Python.
        return cast(Message, metadata("temper"))
    except PackageNotFoundError as error:
        raise NotHere("Temper is not installed, this is a source tree: pip install -e . makes it known") from error


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _words(wrong: list[str]) -> str:
    return " ".join(f"'{text.partition(' ')[0]}'" for text in wrong)
