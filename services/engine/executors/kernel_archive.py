"""Archives of compiled kernels, one for a class of cards: made of one engine's warm cache, unpacked into the empty one
of another. Needs neither torch nor Triton.

A tar.gz whose first member is manifest.json (`Manifest`), and then what Triton keeps under the directory of each key,
and the markers of `compile_ahead`. Triton's keys are digests of the kernel's source, what it is compiled for, and
Triton itself; neither the card's model nor its driver is among them. An archive that fits nothing does no harm.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from services.common.errors import InvalidRequest

MARKER = "compiled-"
"""Beginning of the names of markers, whose content is the architecture that they speak of."""
_MANIFEST = "manifest.json"
_GROUP = "__grp__"
_SCHEMA = 1
_KEY = re.compile(r"[A-Z0-9]{52}")
"""A directory of Triton's cache."""
_FILE = re.compile(r"[A-Za-z0-9_.+-]{1,200}")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of an archive.

    Raises:
        ValueError: it is of a later release, or there is nothing that it could fit.
    """

    arch: int
    """Compute capability that the kernels are compiled for, as Triton names it: 90 for 9.0."""
    triton: str
    """Version of Triton that has compiled them, and that alone finds them."""
    kernels: int
    schema: int = _SCHEMA

    def __post_init__(self) -> None:
        if self.schema > _SCHEMA:
            raise ValueError(
                f"schema {self.schema} of a later release; this one reads up to {_SCHEMA}: take that release, or pack "
                "the kernels with this one"
            )
        if self.arch < 1 or self.kernels < 1 or not self.triton:
            raise ValueError(f"an archive without kernels for a card: {self}")

    @property
    def name(self) -> str:
        """File name of such an archive, without what tells it from others of its kind."""
        return f"kernels-sm{self.arch}-triton{self.triton}.tar.gz"


def pack(cache: Path, destination: Path, arch: int | None = None) -> tuple[Path, Manifest]:
    """Writes the kernels of one class of cards in a cache into an archive.

    Args:
        cache: directory of Triton's cache.
        destination: a file, or a directory that gets one with the manifest's name.
        arch: compute capability; None: the only one that there is.

    Returns:
        The archive, and what is in it.

    Raises:
        InvalidRequest: there is nothing to pack, or it is not clear what.
        OSError
    """
    found = [(path, *compiled) for path in _keys(cache) if (compiled := _compiled(path)) is not None]
    archs = sorted({arch for _, arch, _ in found})
    if arch is None and len(archs) > 1:
        named = ", ".join(map(str, archs))
        raise InvalidRequest(f"{cache} has kernels of several classes of cards ({named}): name one", param="arch")
    chosen = arch if arch is not None else next(iter(archs), None)
    # Of the version that has compiled most: what an earlier one has left is found by nobody.
    versions = Counter(version for _, of, version in found if of == chosen)
    if chosen is None or not versions:
        what = "no compiled kernels" if arch is None else f"no kernels for {arch}"
        raise InvalidRequest(f"{cache} has {what}: start an engine on such a card first, and ask it once", param="arch")
    version = versions.most_common(1)[0][0]
    kept = [path for path, of, by in found if (of, by) == (chosen, version)]
    manifest = Manifest(chosen, version, len(kept))
    path = destination / manifest.name if destination.is_dir() else destination
    beside = [path for path in _keys(cache) if _compiled(path) is None]  # launchers, which Triton compiles for the host
    partial = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(partial, "w:gz", compresslevel=6) as archive:
            _add(archive, _MANIFEST, json.dumps(asdict(manifest)).encode())
            for directory in (*kept, *beside):
                for file in sorted(directory.iterdir()):
                    if file.is_file() and _FILE.fullmatch(file.name) and file.name != "lock":
                        _add(archive, f"{directory.name}/{file.name}", file.read_bytes())
            for marker in sorted(cache.glob(f"{MARKER}*")):
                if marker.read_bytes() == str(chosen).encode():
                    _add(archive, marker.name, marker.read_bytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path, manifest


def read_manifest(archive: Path) -> Manifest:
    """Raises ValueError if the file is no archive of kernels, or one of a later release; OSError."""
    try:
        with tarfile.open(archive, "r:gz") as opened:
            first = opened.next()
            file = opened.extractfile(first) if first is not None and first.name == _MANIFEST else None
            data: Any = json.loads(file.read()) if file is not None else None
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive} is no archive of kernels: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{archive} has no manifest")
    try:
        return Manifest(int(data["arch"]), str(data["triton"]), int(data["kernels"]), int(data["schema"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{archive} has a manifest without {error}") from error
    except ValueError as error:
        raise ValueError(f"{archive}: {error}") from error


def unpack(archive: Path, cache: Path) -> int:
    """Puts what the cache does not have into it; returns the number of directories of kernels.

    Several processes may do so at once: what is there is whole. A marker comes behind all kernels.

    Raises:
        ValueError: the file is damaged, or no archive of kernels.
        OSError
    """
    read_manifest(archive)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=cache) as scratch:
        markers = _extract(archive, Path(scratch))
        count = 0
        for directory in sorted(Path(scratch).iterdir()):
            place = cache / directory.name
            for group in directory.glob(f"{_GROUP}*"):
                _relocate(group, place)
            count += _moved(directory, place)
        for name, content in markers.items():
            (cache / name).write_bytes(content)
    return count


def unpack_fitting(archives: Path, cache: Path, arch: int, triton: str) -> Path | None:
    """Unpacks the archive in a directory that fits a card and this Triton, unless the cache has been warmed up already.

    Returns:
        The archive; None: none was needed, or none fits. One that is damaged is warned of: kernels are then compiled.
    """
    if not archives.is_dir() or any(cache.glob(f"{MARKER}*")):
        return None
    for archive in sorted(archives.glob("*.tar.gz")):
        began = time.monotonic()
        try:
            manifest = read_manifest(archive)
            if (manifest.arch, manifest.triton) != (arch, triton):
                continue
            count = unpack(archive, cache)
        except (OSError, ValueError) as error:
            log.warning("kernels.archive_refused", archive=str(archive), error=str(error))
            continue
        log.info("kernels unpacked", archive=archive.name, kernels=count, seconds=round(time.monotonic() - began, 2))
        return archive
    log.info("kernels.no_archive_fits", archives=str(archives), arch=arch, triton=triton)
    return None


def _keys(cache: Path) -> list[Path]:
    if not cache.is_dir():
        return []
    return sorted(path for path in cache.iterdir() if _KEY.fullmatch(path.name) and path.is_dir())


def _compiled(directory: Path) -> tuple[int, str] | None:
    """Architecture and Triton's version of a directory of the cache; None: it is of no GPU's kernel."""
    for path in directory.glob("*.json"):
        if path.name.startswith(_GROUP):
            continue
        try:
            described = json.loads(path.read_text())
            return int(described["target"]["arch"]), str(described["triton_version"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, io.BytesIO(data))


def _extract(archive: Path, scratch: Path) -> dict[str, bytes]:
    """Writes the kernels' files; returns the markers. Raises ValueError, OSError."""
    markers: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as opened:
            for member, data in _contents(opened):
                directory, _, name = member.rpartition("/")
                if member == _MANIFEST:
                    continue
                if not directory and name.startswith(MARKER) and _FILE.fullmatch(name):
                    markers[name] = data
                elif _KEY.fullmatch(directory) and _FILE.fullmatch(name) and name.strip("."):
                    (scratch / directory).mkdir(exist_ok=True)
                    (scratch / directory / name).write_bytes(data)
                else:
                    raise ValueError(f"{archive} has {member[:100]!r}, which is no file of a kernel")
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive} is damaged: {error}") from error
    return markers


def _contents(opened: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in opened:
        file = opened.extractfile(member) if member.isreg() else None
        if file is None:
            raise ValueError(f"{member.name[:100]!r} is no regular file")
        yield member.name, file.read()


def _relocate(group: Path, place: Path) -> None:
    """Has a group of files name them where they will be: Triton writes full paths."""
    described = json.loads(group.read_text())
    described["child_paths"] = {name: str(place / Path(name).name) for name in described["child_paths"]}
    group.write_text(json.dumps(described))


def _moved(directory: Path, place: Path) -> bool:
    """Moves a directory to a place where there is none; False if another process was quicker, or it is compiled."""
    try:
        directory.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(directory)
        return False
    return True
