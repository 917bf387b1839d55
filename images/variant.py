"""The two variants of the engine image, by what torch is made for.

`python -m images.variant extras VARIANT` prints the extras of pyproject.toml; `python -m images.variant finish VARIANT
DIRECTORY`, in the image's environment, checks that torch is of that kind, builds Triton's launcher for cuda, and
removes what was only for installing.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from images.finish import remove_installers

EXTRAS = {"cuda": ("engine", "gpu"), "cpu": ("engine",)}


def extras(variant: str) -> tuple[str, ...]:
    """Raises SystemExit if there is no such variant."""
    if variant not in EXTRAS:
        raise SystemExit(f"VARIANT={variant}: it is one of {', '.join(EXTRAS)}")
    return EXTRAS[variant]


def finish(variant: str, directory: Path) -> None:
    """Leaves in the directory what the engine's CC needs.

    Raises:
        SystemExit: the torch that was installed is for something else.
    """
    import torch

    if (torch.version.cuda is None) != (variant == "cpu"):
        raise SystemExit(
            f"VARIANT={variant}, but torch {torch.__version__} was installed: name an index or a directory of wheels "
            "that has the other build (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, --build-context wheels=DIR)"
        )
    # torch asks for setuptools, for building extensions and for inductor; Temper does neither.
    remove_installers([Path(sysconfig.get_path("purelib"))])
    directory.mkdir(parents=True)
    if variant == "cuda":
        from images.launcher import build

        build(directory)
    shutil.copyfile(Path(__file__).with_name("prebuilt_cc.py"), directory / "cc")
    (directory / "cc").chmod(0o755)


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["extras", variant]:
            sys.stdout.write(" ".join(extras(variant)) + "\n")
        case ["finish", variant, directory]:
            extras(variant)
            finish(variant, Path(directory))
        case _:
            sys.stderr.write("usage: python -m images.variant extras VARIANT | finish VARIANT DIRECTORY\n")
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
