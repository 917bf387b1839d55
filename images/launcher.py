"""Builds the one C module that Triton needs at run time, so that the engine image needs no compiler.

Before its first launch Triton 3.7 compiles ``driver.c`` of its NVIDIA backend into the module ``cuda_utils``
(triton/backends/nvidia/driver.py, the only caller of compile_module_from_src; 3.6 had another one a kernel). Kernels
themselves go through LLVM and the ptxas that is in Triton's wheel. It runs whatever CC names (triton/runtime/build.py),
so the image's CC is `images/prebuilt_cc.py`, which gives back what was built here.
"""

from __future__ import annotations

import hashlib
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from triton.backends.nvidia import driver

LIBCUDA = "libcuda.so.1"


def build(directory: Path) -> None:
    """Leaves ``cuda_utils.so`` and ``cuda_utils.sha256``, the digest of its source, in an existing directory.

    Raises:
        subprocess.CalledProcessError: gcc failed; it said why on stderr.
    """
    source = (Path(driver.dirname) / "driver.c").read_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        # The real one comes with the node's driver, when a container starts. To link against, its name is enough.
        stub = Path(scratch, LIBCUDA)
        subprocess.run(["gcc", "-shared", f"-Wl,-soname,{LIBCUDA}", "-o", stub, "-x", "c", "/dev/null"], check=True)
        path = Path(scratch, "cuda_utils.c")
        path.write_bytes(source)
        # Triton's own command line, but the library stays on the module's list although the stub has none of its names.
        command: list[str | Path] = [
            "gcc",
            path,
            "-O3",
            "-shared",
            "-fPIC",
            "-Wno-psabi",
            "-o",
            directory / "cuda_utils.so",
        ]
        command += ["-Wl,--no-as-needed", f"-L{scratch}", f"-l:{LIBCUDA}"]
        command += [f"-I{include}" for include in (*driver.include_dirs, sysconfig.get_path("include"))]
        subprocess.run(command, check=True)
    (directory / "cuda_utils.sha256").write_text(hashlib.sha256(source).hexdigest())
