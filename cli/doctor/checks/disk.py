"""Directories and the space in them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place

_LEAST, _USUAL = 2**29, 4 * 2**30
"""Bytes: compiled kernels and a first adapter; a day of logs, adapters and checkpoints."""


def space(place: Place) -> Finding:
    """There is space for data and compiled kernels."""
    free = {directory: shutil.disk_usage(_existing(directory)).free for directory in _directories(place)}
    directory, least = min(free.items(), key=lambda entry: entry[1])
    way_out = "make room, or name another directory with --data-dir or TEMPER_CACHE_DIR"
    if least < _LEAST:
        return failure(f"{directory} has {_gib(least)} free", way_out)
    if least < _USUAL:
        return warning(f"{directory} has {_gib(least)} free, which logs, adapters and checkpoints fill soon", way_out)
    return ok(f"{_gib(least)} are free")


def tier(place: Place) -> Finding:
    """There is space for the disk tier of the prefix cache, where it is on."""
    if "disk" not in [tier.strip() for tier in place.engine.tiers.split(",")]:
        raise NotHere("TEMPER_TIERS has no disk")
    directory, wanted = place.engine.tier_directory, int(place.engine.tier_disk_bytes)
    left = shutil.disk_usage(_existing(directory)).free
    if left < wanted:
        return warning(
            f"the disk tier may take {_gib(wanted)} of {directory}, where {_gib(left)} are free",
            "lower TEMPER_TIER_DISK_BYTES, or name another TEMPER_TIER_DISK_DIR",
        )
    return ok(f"{_gib(left)} are free for the disk tier, which takes {_gib(wanted)} at most")


def writable(place: Place) -> Finding:
    """Data and compiled kernels can be written."""
    for directory, option in _directories(place).items():
        try:
            with tempfile.TemporaryFile(dir=_existing(directory)):
                pass
            blocked = next(
                (part for part in (directory, *directory.parents) if part.exists() and not part.is_dir()), None
            )
        except OSError as error:
            return failure(f"{directory} cannot be written: {error.strerror or error}", f"name another with {option}")
        if blocked is not None:
            return failure(f"{directory} cannot be made: {blocked} is a file", f"name another with {option}")
    return ok("data and compiled kernels can be written")


def _directories(place: Place) -> dict[Path, str]:
    """Directory → how to name another."""
    return {
        place.data_dir.absolute(): "--data-dir",
        place.up.cache_dir.expanduser().absolute(): "TEMPER_CACHE_DIR",
    }


def _existing(directory: Path) -> Path:
    """The directory, or the nearest above it that is there."""
    return next(part for part in (directory, *directory.parents) if part.is_dir())


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
