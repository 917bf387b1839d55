"""Installs the clients that tests run: `python -m tests.conformance.clients.install`. Nothing where all is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv

from tests.conformance.clients.place import HERE, PYTHON, ROOT, STAMP, installed, node, wanted


def main() -> None:
    """npm for what package-lock.json pins, without install scripts; pip for requirements.txt, in an environment."""
    if installed():
        return
    print("Installing clients (about a minute and 2.1 GB the first time)", flush=True)
    shutil.rmtree(ROOT, ignore_errors=True)
    directory = ROOT / "node"
    directory.mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(HERE / name, directory / name)
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    subprocess.run(
        # Not ci: it wants the optional packages of every platform in the lock, which not every registry serves.
        [node(), npm, "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"],
        cwd=directory,
        env={**os.environ, "PATH": f"{node().parent}:{os.environ['PATH']}"},
        check=True,
    )
    venv.create(ROOT / "python", with_pip=True)
    # Without dependencies: all that is needed is listed, and what lm_eval asks for and never imports is not.
    options = ["install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps"]
    subprocess.run([PYTHON, "-m", "pip", *options, "-r", HERE / "requirements.txt"], check=True)
    STAMP.write_text(wanted())


if __name__ == "__main__":
    main()
