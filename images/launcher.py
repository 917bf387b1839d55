"""Builds the one C module that Triton needs at run time, so that the engine image needs no compiler.

Before its first launch Triton compiles ``driver.c`` of its NVIDIA backend into the module ``cuda_utils`` (3.7:
triton/backends/nvidia/driver.py, the only caller of compile_module_from_src; kernels themselves go through LLVM and the
ptxas that is in Triton's wheel). It runs whatever CC names (triton/runtime/build.py), so the image's CC is
`images/prebuilt_cc.py`, which gives back what was built here.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

from triton.backends.nvidia import driver
from triton.runtime.build import _build

LIBCUDA = "libcuda.so.1"


def build(directory: Path) -> None:
    """Leaves ``cuda_utils.so`` and ``cuda_utils.sha256``, the digest of its source, in an existing directory."""
    source = (Path(driver.dirname) / "driver.c").read_text()
    with tempfile.TemporaryDirectory() as scratch:
        # The real one comes with the node's driver, when a container starts. To link against, its name is enough.
        subprocess.run(
            ["gcc", "-shared", f"-Wl,-soname,{LIBCUDA}", "-o", f"{scratch}/{LIBCUDA}", "-x", "c", "/dev/null"],
            check=True,
        )
        path = Path(scratch, "cuda_utils.c")
        path.write_text(source)
        built = _build(
            "cuda_utils",
            str(path),
            scratch,
            [driver.libdevice_dir, scratch],
            driver.include_dirs,
            driver.libraries,
            ["-Wl,--no-as-needed"],
        )
        (directory / "cuda_utils.so").write_bytes(Path(built).read_bytes())
    (directory / "cuda_utils.sha256").write_text(hashlib.sha256(source.encode()).hexdigest())
