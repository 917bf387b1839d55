"""`make images-check`: builds the images on a bootstrapped Debian, looks at what is in them, and runs them.

`python -m images.check [--engine]`. The gateway answers its own health command and ends at SIGTERM with status 0. With
--engine the engine image (with the CPU's torch) fetches a checkpoint from a real S3 server, serves it to the gateway
image, and a chat goes through both. As root on Debian, with buildah and debootstrap.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.local.ports import LOOPBACK, claim_ports
from images import contents
from images.buildah import ROOT, CheckFailed, Image, Store, run
from images.container import Container, wait_for
from images.project import requirements

GATEWAY_STRANGERS = ("torch", "numpy", "triton", "transformers", "setuptools", "pip", "wheel")
ENGINE_STRANGERS = ("transformers", "peft", "setuptools", "pip", "wheel")
_PROBE = ("python", "-m", "services.gateway.server.probe")
_CACHE = ROOT / ".venv" / "cache" / "images"
_EXIT_SECONDS = 30.0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m images.check", description=__doc__)
    parser.add_argument("--engine", action="store_true", help="the engine image, too: some minutes and 8 GB of disk")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="where the bootstrapped Debian and wheels are kept")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("images-check: run it as root: debootstrap and mounts need it\n")
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="temper-images-") as scratch:
            _check(Path(scratch), arguments.cache, engine=arguments.engine)
    except CheckFailed as error:
        sys.stderr.write(f"images-check: {error}\n")
        return 1
    return 0


def _check(scratch: Path, cache: Path, *, engine: bool) -> None:
    store = Store(scratch)
    try:
        with _step("base"):
            store.make_bases(cache)
        gateway = _image(store, cache, "gateway", {}, ["gateway"])
        contents.check(gateway, forbidden=GATEWAY_STRANGERS)
        taken = contents.size(contents.site_packages(gateway))
        if taken > contents.GATEWAY_BYTES:
            raise CheckFailed(f"the gateway's site-packages take {taken:,} bytes, over {contents.GATEWAY_BYTES:,}")
        _say(
            "gateway: contents",
            f"{taken / 1e6:.0f} MB of site-packages, {len(contents.installed(gateway))} distributions",
        )
        _run_gateway(gateway, scratch)
        if engine:
            # Only here: it needs the servers of the extra "local".
            from images.check_engine import run_engine

            image = _image(store, cache, "engine", {"VARIANT": "cpu"}, ["engine"])
            contents.check(image, forbidden=(*ENGINE_STRANGERS, "triton"))
            taken = contents.size(contents.site_packages(image))
            _say(
                "engine: contents",
                f"{taken / 1e6:.0f} MB of site-packages, {len(contents.installed(image))} distributions",
            )
            with _step("engine: fetch, start, chat, stop"):
                run_engine(image, gateway, scratch)
    finally:
        store.remove()


def _image(store: Store, cache: Path, service: str, arguments: dict[str, str], extras: list[str]) -> Image:
    wheels = cache / f"wheels-{service}"
    with _step(f"{service}: wheels"):
        _download(wheels, extras)
    labels = {"REVISION": "check", "CREATED": "1970-01-01T00:00:00Z", "SOURCE": "check"}
    with _step(f"{service}: build"):
        return store.build(f"services/{service}/Dockerfile", f"temper/{service}:check", wheels, labels | arguments)


def _download(wheels: Path, extras: list[str]) -> None:
    """Downloads wheels with this machine's pip and its configuration: the build itself reaches no index. For Debian's
    Python 3.11."""
    wheels.mkdir(parents=True, exist_ok=True)
    run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version=3.11",
            "--find-links", str(wheels), "--dest", str(wheels), "--constraint", str(ROOT / "constraints.txt"),
            # redis wants it from Pythons before 3.11.3, as Debian's is; pip asks the Python that it runs in.
            *requirements(extras), "async-timeout",
        ]
    )  # fmt: skip


def _run_gateway(image: Image, scratch: Path) -> None:
    (port,) = claim_ports(1)
    env = {"TEMPER_HOST": LOOPBACK, "TEMPER_PORT": str(port.number)}
    container = Container(image, image.config["Entrypoint"], env, scratch / "gateway.log")
    try:
        seconds = wait_for(container, image, _PROBE, env, 60.0)
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port.number}/livez", timeout=5.0) as answer:
            if answer.status != 200:
                raise CheckFailed(f"/livez answers {answer.status}")
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port.number}/version", timeout=5.0) as answer:
            version = json.load(answer)["version"]
        if version != image.config["Labels"]["org.opencontainers.image.version"]:
            raise CheckFailed(f"the gateway says that it is {version!r}, its label says otherwise")
        status = container.terminate(_EXIT_SECONDS)
        if status:
            raise CheckFailed(f"the gateway ended with status {status} at SIGTERM: {container.output()[-2000:]}")
    finally:
        container.kill()
    _say("gateway: runs", f"healthy after {seconds:.1f} s as process 1, status 0 at SIGTERM")


@contextmanager
def _step(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    _say(name, f"{time.monotonic() - began:.1f} s")


def _say(name: str, text: str) -> None:
    sys.stdout.write(f"{name}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
