"""Images without a daemon and without a registry: a base by debootstrap, builds by buildah in a store of their own.

Debian's buildah runs a build's commands in a chroot, which works inside containers and on build machines that may not
make namespaces of their own. Needs root.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUITE = "bookworm"
BASE, BUILDER = "localhost/temper-base", "localhost/temper-builder"
_BASE_PACKAGES = "ca-certificates,python3"
_BUILDER_PACKAGES = "gcc libc6-dev python3-dev python3-pip"
_BUILD_SECONDS = 1800.0


class CheckFailed(Exception):
    """An image does not hold what it must; one line says what."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image, mounted: its files and its configuration (https://specs.opencontainers.org/image-spec/config/)."""

    name: str
    root: Path
    config: Mapping[str, Any]

    @property
    def env(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.config["Env"])


class Store:
    """buildah's images and layers, under one directory."""

    def __init__(self, directory: Path) -> None:
        for tool in ("buildah", "debootstrap"):
            if shutil.which(tool) is None:
                raise CheckFailed(f"{tool} is not installed: apt-get install buildah debootstrap")
        self._directory = directory

    def make_bases(self, cache: Path) -> None:
        """BASE (Debian with Python), and BUILDER, which has pip and a compiler besides.

        Args:
            cache: where the bootstrapped Debian is kept as a tar file, for the next time.
        """
        tar = cache / f"{SUITE}.tar"
        if not tar.exists():
            cache.mkdir(parents=True, exist_ok=True)
            tree = self._directory / "debian"
            run(["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", SUITE, str(tree)])
            run(["tar", "-C", str(tree), "-cf", f"{tar}.new", "."])
            Path(f"{tar}.new").replace(tar)
            shutil.rmtree(tree)
        self._from_text(f"FROM scratch\nADD {tar.name} /\n", BASE, cache)
        install = f"apt-get install -y -qq --no-install-recommends {_BUILDER_PACKAGES}"
        self._from_text(f"FROM {BASE}\nRUN apt-get update -qq && {install}\n", BUILDER, cache)

    def build(self, dockerfile: str, name: str, wheels: Path, arguments: Mapping[str, str]) -> Image:
        """Builds one of our Dockerfiles on BASE, from a directory of wheels and without an index, and mounts it."""
        given = {"BASE_IMAGE": BASE, "BUILDER_IMAGE": BUILDER, "PIP_NO_INDEX": "1", **arguments}
        options = [text for key, value in given.items() for text in ("--build-arg", f"{key}={value}")]
        self._buildah(
            "build", "--isolation", "chroot", *options, "--build-context", f"wheels={wheels}", "--tag", name,
            "--file", str(ROOT / dockerfile), str(ROOT),
        )  # fmt: skip
        container = self._buildah("from", f"localhost/{name}").split()[-1]
        mounted = Path(self._buildah("mount", container).strip())
        described = json.loads(self._buildah("inspect", "--type", "image", f"localhost/{name}"))
        return Image(name, mounted, described["OCIv1"]["config"])

    def remove(self) -> None:
        """Gives the disk back."""
        self._buildah("umount", "--all")
        self._buildah("rm", "--all")
        shutil.rmtree(self._directory, ignore_errors=True)

    def _from_text(self, text: str, name: str, context: Path) -> None:
        file = self._directory / "Containerfile"
        file.write_text(text)
        self._buildah("build", "--isolation", "chroot", "--tag", name, "--file", str(file), str(context))

    def _buildah(self, *arguments: str) -> str:
        store = ["--root", str(self._directory / "store"), "--runroot", str(self._directory / "run")]
        return run(["buildah", *store, "--storage-driver", "vfs", *arguments])


def run(command: Sequence[str], seconds: float = _BUILD_SECONDS) -> str:
    """Runs a command. Returns its standard output.

    Raises:
        CheckFailed: it failed; what it said goes to stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-8000:])
        raise CheckFailed(f"{' '.join(command[:2])} … exited with status {done.returncode}")
    return done.stdout
