"""Runs a command of a mounted image about as Kubernetes would: its user, its environment, process 1, a read-only root.

What a runtime adds and this does not: cgroups, seccomp, a network of its own. The network is the host's, so servers
listen on loopback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from images.buildah import CheckFailed, Image
from images.finish import USER

_ENTER = r"""
set -e
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount -o remount,ro,bind "$ROOT"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
for volume in $VOLUMES; do
    mkdir -p "$ROOT/tmp/$(basename "$volume")"
    mount --bind "$volume" "$ROOT/tmp/$(basename "$volume")"
done
exec chroot --userspec="$USER_ID:$USER_ID" --groups= "$ROOT" env -i -C /app "$@"
"""


class Container:
    """A running command.

    Args:
        volumes: directories of the host; ``/tmp/NAME`` in the container. Their owner is made the image's user.
    """

    def __init__(
        self,
        image: Image,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        volumes: Sequence[Path] = (),
    ) -> None:
        for volume in volumes:
            os.chown(volume, USER, USER)
        variables = {
            "ROOT": str(image.root),
            "USER_ID": str(USER),
            "VOLUMES": " ".join(map(str, volumes)),
            "PATH": os.environ["PATH"],
        }
        inside = [f"{key}={value}" for key, value in {**image.env, **env}.items()]
        self.name, self.log = f"{image.name} {' '.join(command)}", log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh", *inside, *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> int:
        """Waits for the container's end. Returns its exit status.

        Raises:
            CheckFailed: it is still running after so long.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CheckFailed(f"{self.name} still runs after {seconds:g} s: {self.output()[-2000:]}") from None

    def terminate(self, seconds: float) -> int:
        """SIGTERM to the container's process 1; its exit status."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def call(image: Image, command: Sequence[str], env: Mapping[str, str], log: Path, volumes: Sequence[Path] = ()) -> int:
    """Runs a command to its end; its exit status."""
    return Container(image, command, env, log, volumes).wait(120.0)


def wait_for(container: Container, image: Image, probe: Sequence[str], env: Mapping[str, str], seconds: float) -> float:
    """Runs a probe again and again until it succeeds; how many seconds that took.

    Raises:
        CheckFailed: the container ended, or the probe never succeeded.
    """
    began = time.monotonic()
    log = Path(f"{container.log}.probe")
    while call(image, probe, env, log) != 0:
        if not container.is_running():
            raise CheckFailed(f"{container.name} ended: {container.output()[-3000:]}")
        if time.monotonic() - began > seconds:
            raise CheckFailed(f"{' '.join(probe)} fails after {seconds:g} s: {log.read_text()[-500:]}")
    return time.monotonic() - began
