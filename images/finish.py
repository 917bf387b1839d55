"""The last step of an image: takes out what is only for installing, makes the user, writes the bill of materials.

Runs as root with the image's own Python, without a shell, so that any base with a Python will do:
`python -m images.finish NAME`. SOURCE_DATE_EPOCH (https://reproducible-builds.org/specs/source-date-epoch/) is the time
in the bill.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from images import sbom

USER = 10001
INSTALLERS = ("pip", "setuptools", "wheel", "ensurepip", "pkg_resources", "_distutils_hack")
PASSWD = f"temper:x:{USER}:{USER}:temper:/tmp:/usr/sbin/nologin\n"
GROUP = f"temper:x:{USER}:\n"
"""torch and others ask who they are, and fail where a user id has no name."""


def remove_installers(directories: list[Path]) -> None:
    """Removes installers from Python's own directories; official Python images come with them."""
    for directory in directories:
        for name in INSTALLERS:
            shutil.rmtree(directory / name, ignore_errors=True)
            for left in directory.glob(f"{name}-*.dist-info"):
                shutil.rmtree(left)
        (directory / "distutils-precedence.pth").unlink(missing_ok=True)
        for pattern in ("pip", "pip[0-9]*"):
            for command in (directory.parents[2] / "bin").glob(pattern):
                command.unlink()


def add_user(etc: Path) -> None:
    """Gives the user id a name."""
    for file, line in (("passwd", PASSWD), ("group", GROUP)):
        path = etc / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if line not in text:
            path.write_text(text + line, encoding="utf-8")


def main(name: str) -> None:
    """Args: the image's name, for its bill of materials."""
    library = Path(sysconfig.get_path("stdlib"))
    # The last is Debian's own.
    remove_installers([library, library / "site-packages", library.parent / "python3" / "dist-packages"])
    add_user(Path("/etc"))
    site = Path(sysconfig.get_path("purelib"))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    sbom.write(Path("/app/sbom.cdx.json"), name, version("temper"), site, Path("/var/lib/dpkg/status"), seconds)


if __name__ == "__main__":
    main(sys.argv[1])
