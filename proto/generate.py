"""Writes the Python stubs of the protocol to services/common/pb. `--check` fails if they are not current."""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "proto").glob("temper/v1/*.proto"))
TARGET = ROOT / "services" / "common" / "pb"


def generate(target: Path) -> None:
    """Compiles every .proto of temper.v1 into flat modules of the package services.common.pb."""
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        # Named, because the environment of this Python need not be the active one.
        plugins = [
            f"--plugin={name}={Path(sys.executable).parent / name}"
            for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
        ]
        status = protoc.main(["protoc", f"--proto_path={ROOT / 'proto'}", *plugins, *outputs, *map(str, SOURCES)])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        for generated in sorted(Path(scratch, "temper", "v1").iterdir()):
            text = generated.read_text()
            text = text.replace("from temper.v1 import", "from services.common.pb import")
            text = text.replace("import temper.v1.", "import services.common.pb.").replace("temper.v1.", "temper.v1.")
            (target / generated.name).write_text(text)
        (target / "__init__.py").write_text(
            '"""Generated from proto/temper/v1 by proto/generate.py (`make proto`)."""\n'
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        names = sorted({p.name for p in Path(fresh).iterdir()} | {p.name for p in TARGET.iterdir() if p.is_file()})
        _, mismatch, missing = filecmp.cmpfiles(fresh, TARGET, names, shallow=False)
    if mismatch or missing:
        print(f"stale stubs, run `make proto`: {', '.join(mismatch + missing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
