"""The small programs that run while an image is built."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from images import finish, prebuilt_cc, sbom
from images.project import project, requirements, write_metadata
from images.variant import extras

STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u14
Description: GNU C Library
 Package: not-a-field

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tzdata
Status: install ok installed
Version: 2025b-0+deb12u1
"""


def test_requirements_are_those_of_all_services_and_of_the_extras() -> None:
    lines = requirements(["engine", "gpu"])
    names = {re.match(r"[\w-]+", line)[0] for line in lines}  # type: ignore[index]
    assert {"grpcio", "torch", "triton"} <= names
    assert "fastapi" not in names
    with pytest.raises(SystemExit, match="no extra 'gatway': it has cli, "):
        requirements(["gatway"])


def test_metadata_is_read_by_importlib(tmp_path: Path) -> None:
    write_metadata(tmp_path, ["gateway"])
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("temper", project()["version"])
    assert sorted(found.requires or []) == requirements(["gateway"])


def test_bill_of_materials_has_python_and_debian_and_is_the_same_twice(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS)
    for name in ("first", "second"):
        sbom.write(
            tmp_path / name, "temper/gateway", "1.2", Path(pytest.__file__).parents[1], tmp_path / "status", 86400
        )
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    bill = json.loads((tmp_path / "first").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["timestamp"] == "1970-01-02T00:00:00Z"
    purls = {component["purl"] for component in bill["components"]}
    assert f"pkg:pypi/pytest@{pytest.__version__}" in purls
    assert {purl for purl in purls if purl.startswith("pkg:deb/")} == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64",
        "pkg:deb/debian/tzdata@2025b-0%2Bdeb12u1?arch=all",
    }
    references = {component["bom-ref"] for component in bill["components"]}
    assert len(references) == len(bill["components"])
    edges = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert all(set(targets) <= references for targets in edges.values())
    (pytest_needs,) = [targets for source, targets in edges.items() if source.startswith("pkg:pypi/pytest@")]
    assert any(target.startswith("pkg:pypi/pluggy@") for target in pytest_needs)


def test_a_base_without_dpkg_has_no_debian_packages(tmp_path: Path) -> None:
    assert sbom.debian_components(tmp_path / "none") == []


def test_installers_go_and_nothing_else(tmp_path: Path) -> None:
    site = tmp_path / "usr/local/lib/python3.12/site-packages"
    for name in ("pip", "pip-25.0.dist-info", "setuptools", "pipeline"):
        (site / name).mkdir(parents=True)
    binaries = tmp_path / "usr/local/bin"
    binaries.mkdir()
    for name in ("pip", "pip3.12", "pipewire", "python3"):
        (binaries / name).touch()
    finish.remove_installers([site])
    assert [path.name for path in site.iterdir()] == ["pipeline"]
    assert sorted(path.name for path in binaries.iterdir()) == ["pipewire", "python3"]


def test_the_user_is_added_once(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    finish.add_user(tmp_path)
    finish.add_user(tmp_path)
    assert (tmp_path / "passwd").read_text().splitlines()[1:] == [finish.PASSWD.strip()]
    assert (tmp_path / "group").read_text() == finish.GROUP


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(SystemExit, match="VARIANT=rocm: it is one of cuda, cpu"):
        extras("rocm")


def compiler(tmp_path: Path, source: str) -> tuple[list[str], Path]:
    """Triton's command line for a source, and its output."""
    (tmp_path / "cuda_utils.c").write_text(source)
    output = tmp_path / "out.so"
    return [str(tmp_path / "cuda_utils.c"), "-O3", "-shared", "-fPIC", "-o", str(output), "-lcuda"], output


def test_the_compiler_of_the_image_gives_back_what_was_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prebuilt = tmp_path / "launcher"
    prebuilt.mkdir()
    arguments, output = compiler(tmp_path, "int x;")
    assert prebuilt_cc.main(arguments, prebuilt) == 1, "the cpu variant has none"
    (prebuilt / "cuda_utils.so").write_bytes(b"module")
    digest = prebuilt_cc.hashlib.sha256(b"int x;").hexdigest()
    (prebuilt / "cuda_utils.sha256").write_text(digest)
    assert prebuilt_cc.main(arguments, prebuilt) == 0
    assert output.read_bytes() == b"module"
    capsys.readouterr()
    arguments, _ = compiler(tmp_path, "int y;")
    assert prebuilt_cc.main(arguments, prebuilt) == 1
    assert "this image has no C compiler" in capsys.readouterr().err
    assert prebuilt_cc.main(["--version"], prebuilt) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
def test_triton_compiles_one_module_and_asks_cc_for_it() -> None:
    """What images/launcher.py relies on; a new Triton that compiles more needs more to be built before."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    triton = Path(spec.origin).parent
    callers = [
        (path.relative_to(triton).as_posix(), text.count("compile_module_from_src("))
        for path in sorted(triton.rglob("*.py"))
        if "compile_module_from_src(" in (text := path.read_text()) and "backends/amd" not in path.as_posix()
    ]
    assert callers == [("backends/nvidia/driver.py", 1), ("runtime/build.py", 1)]
    assert 'name="cuda_utils"' in (triton / "backends/nvidia/driver.py").read_text()
    assert 'os.environ.get("CC")' in (triton / "runtime/build.py").read_text()
    assert (triton / "backends/nvidia/bin/ptxas").is_file()
