"""Kernels are compiled by other processes into Triton's cache, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from kernels.gpu.block_tables import _write_tables_kernel, write_tables
from kernels.gpu.state_copy import copy_states
from services.engine.cuda.compile_ahead import _Target, compile_ahead, recorded

driver.set_active(_Target(GPUTarget("cuda", 90, 32)))
tables = torch.zeros(4, 8, dtype=torch.int32)
entries = torch.zeros(2, 2, dtype=torch.int32)

def launch():
    write_tables(tables, entries)
    write_tables(tables, entries)
    copy_states(torch.zeros(2, 3, 16), entries)

print(compile_ahead(launch), compile_ahead(launch))
with recorded() as variants:
    launch()
print([variant.name for variant in variants])
assert not _write_tables_kernel.device_caches[0][0], "this process compiled"
"""


def test_what_a_run_launches_is_compiled_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=200)
    assert done.stdout.splitlines() == ["2 0", "['_write_tables_kernel', '_copy_states_kernel']"], done.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == 2
