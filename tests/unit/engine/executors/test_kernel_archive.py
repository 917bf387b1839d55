"""Archives of compiled kernels: what is in them, which one a start takes, and what they may not bring."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from services.common.errors import InvalidRequest
from services.engine.executors.kernel_archive import Manifest, pack, read_manifest, unpack, unpack_fitting


def key(number: int) -> str:
    return f"{number:A>52}"


def kernel(cache: Path, number: int, arch: int = 90, version: str = "3.7.1") -> None:
    """A kernel as Triton keeps it."""
    directory = cache / key(number)
    directory.mkdir(parents=True)
    (directory / "k.json").write_text(json.dumps({"target": {"arch": arch}, "triton_version": version}))
    (directory / "k.cubin").write_bytes(bytes([number]) * 100)
    paths = {name: str(directory / name) for name in ("k.json", "k.cubin")}
    (directory / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))


def marker(cache: Path, name: str, content: str) -> None:
    (cache / f"compiled-{name}").write_text(content)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Three kernels for 9.0, one of an earlier Triton, one for 8.9, and a launcher."""
    place = tmp_path / "cache"
    for number in (1, 2, 3):
        kernel(place, number)
    kernel(place, 4, version="3.6.0")
    kernel(place, 5, arch=89)
    launcher = place / key(6)
    launcher.mkdir()
    (launcher / "launcher.so").write_bytes(b"host")
    marker(place, "a", "90")
    marker(place, "b", "89")
    marker(place, "c", "")
    return place


def contents(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def test_a_cache_comes_out_as_it_went_in_and_knows_its_place(cache: Path, tmp_path: Path) -> None:
    archive, manifest = pack(cache, tmp_path, 90)
    assert archive.name == "kernels-sm90-triton3.7.1.tar.gz"
    assert manifest == Manifest(90, "3.7.1", 3) == read_manifest(archive)
    other = tmp_path / "other"
    assert unpack(archive, other) == 4
    files = ("k.json", "k.cubin", "__grp__k.json")
    kept = {f"{key(number)}/{file}" for number in (1, 2, 3) for file in files}
    assert contents(other) == kept | {f"{key(6)}/launcher.so", "compiled-a"}
    group = json.loads((other / key(1) / "__grp__k.json").read_text())
    assert group["child_paths"] == {name: str(other / key(1) / name) for name in ("k.json", "k.cubin")}
    assert (other / key(2) / "k.cubin").read_bytes() == bytes([2]) * 100
    assert not list(tmp_path.glob(".*partial"))


def test_what_is_there_already_stays(cache: Path, tmp_path: Path) -> None:
    archive, _ = pack(cache, tmp_path, 90)
    other = tmp_path / "other"
    kernel(other, 1)
    (other / key(1) / "k.cubin").write_bytes(b"own")
    assert unpack(archive, other) == 3
    assert (other / key(1) / "k.cubin").read_bytes() == b"own"
    assert unpack(archive, other) == 0


def test_one_class_of_cards_is_packed(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"several classes of cards \(89, 90\): name one"):
        pack(cache, tmp_path)
    assert pack(cache, tmp_path / "mine.tar.gz", 89)[1] == Manifest(89, "3.7.1", 1)
    with pytest.raises(InvalidRequest, match="no kernels for 120"):
        pack(cache, tmp_path, 120)
    with pytest.raises(InvalidRequest, match="no compiled kernels"):
        pack(tmp_path / "nothing", tmp_path)


def test_a_start_takes_the_archive_that_fits_and_only_into_an_empty_cache(cache: Path, tmp_path: Path) -> None:
    archives = tmp_path / "archives"
    archives.mkdir()
    (archives / "damaged.tar.gz").write_bytes(b"not an archive")
    for arch in (89, 90):
        pack(cache, archives, arch)
    fitting = archives / "kernels-sm90-triton3.7.1.tar.gz"
    assert unpack_fitting(archives, tmp_path / "a", 90, "3.8.0") is None
    assert unpack_fitting(archives, tmp_path / "a", 120, "3.7.1") is None
    assert not (tmp_path / "a").exists()
    assert unpack_fitting(archives, tmp_path / "a", 90, "3.7.1") == fitting
    (tmp_path / "a" / key(1) / "k.cubin").unlink()
    assert unpack_fitting(archives, tmp_path / "a", 90, "3.7.1") is None, "warmed up already"
    assert unpack_fitting(tmp_path / "nowhere", tmp_path / "b", 90, "3.7.1") is None


@pytest.mark.parametrize(
    "name", ["../escaped", "/tmp/escaped", f"{key(1)}/../../escaped", f"{key(1)}/..", "other/file", "compiled-../x"]
)
def test_nothing_leaves_the_cache(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for member, data in (
            ("manifest.json", b'{"arch": 90, "triton": "3.7.1", "kernels": 1, "schema": 1}'),
            (name, b"x"),
        ):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    with pytest.raises(ValueError, match="no file of a kernel"):
        unpack(archive, tmp_path / "cache")
    assert contents(tmp_path) == {"a.tar.gz"}


def test_links_later_releases_and_torn_files_are_refused(cache: Path, tmp_path: Path) -> None:
    archive = tmp_path / "links.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        entry = tarfile.TarInfo("manifest.json")
        data = b'{"arch": 90, "triton": "3.7.1", "kernels": 1, "schema": 1}'
        entry.size = len(data)
        file.addfile(entry, io.BytesIO(data))
        link = tarfile.TarInfo(f"{key(1)}/k.cubin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    with pytest.raises(ValueError, match="no regular file"):
        unpack(archive, tmp_path / "a")
    with pytest.raises(ValueError, match="later release"):
        Manifest(90, "3.7.1", 1, schema=2)
    whole, _ = pack(cache, tmp_path, 90)
    whole.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(ValueError, match="damaged"):
        unpack(whole, tmp_path / "a")
    assert contents(tmp_path / "a") == set()
