#!/opt/venv/bin/python -I
"""C compiler that CC names in the engine image: it "compiles" Triton's one C module by giving back what
images/launcher.py built.

Anything else ends with status 1 and a line that says why there is no compiler.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str], prebuilt: Path) -> int:
    """Args: the command line that Triton gives a compiler: its source first, ``-o`` before its output."""
    source = Path(next((text for text in arguments if text.endswith(".c")), ""))
    digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""
    built = prebuilt / "cuda_utils.sha256"
    if not built.is_file() or digest != built.read_text().strip() or "-o" not in arguments[:-1]:
        sys.stderr.write(
            "this image has no C compiler: what was compiled when it was built is Triton's launcher (VARIANT=cuda), "
            f"and {source} is something else; build the image anew with this Triton, or set CC to a compiler\n"
        )
        return 1
    shutil.copyfile(prebuilt / "cuda_utils.so", arguments[arguments.index("-o") + 1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path(__file__).resolve().parent))
