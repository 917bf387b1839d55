"""Kernels are compiled by other processes into Triton's cache, once, and launches find them there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.executors.kernel_archive import pack, unpack_fitting

SCRIPT = """
import os
from unittest.mock import patch
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from kernels.gpu.attention.decode import paged_decode
from kernels.gpu.attention.prefill import OVERLAPPED, paged_prefill
from kernels.gpu.copies.block_tables import _write_tables_kernel, write_tables
from kernels.gpu.lora.rows import LoraRows
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.segments import Segments
from kernels.gpu.linear.skinny import skinny_linear
from kernels.gpu.copies.state_copy import copy_states
from kernels.gpu.launch.trusted_constants import trust_constants
from services.engine.executors.cuda.compile_ahead import Target, compile_ahead, compiled_here, recorded
from tests.kernels.hopper import compiled

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one process that compiles, beside this one
driver.set_active(Target(GPUTarget("cuda", 90, 32)))
tables = torch.zeros(4, 8, dtype=torch.int32)
entries = torch.zeros(2, 2, dtype=torch.int32)
x, weight = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
ints = torch.zeros(4, dtype=torch.int32)
lora = LoraRows(
    torch.zeros(4, 2, 16, 128, dtype=torch.bfloat16), torch.zeros(4, 16, 64, dtype=torch.bfloat16), (32, 64), ints,
    ints, ints,
)

pages = KvPages.allocate(2, 16, 4, 256, torch.bfloat16, "cpu")
q, projected = torch.zeros(4, 16, 256, dtype=torch.bfloat16), torch.zeros(4, 4096, dtype=torch.bfloat16)
segments = Segments.build([4], [0], [1], [0], "cpu")
# Pairs of e4m3 in heads of 16 dimensions: half as many as a tensor core product takes.
few = KvPages.allocate(2, 16, 2, 16, torch.float8_e4m3fn, "cpu")
row, gate = torch.zeros(1, 4, 16, dtype=torch.bfloat16), torch.zeros(1, 192, dtype=torch.bfloat16)

def launch():
    paged_prefill(q, projected, pages, tables, segments, config=OVERLAPPED)
    write_tables(tables, entries)
    write_tables(tables, entries)
    copy_states(torch.zeros(2, 3, 16), entries)
    skinny_linear(x, weight, lora=lora)
    paged_decode(row, gate, few, tables, ints[:1], ints[:1], 4)

print(compile_ahead(launch), compile_ahead(launch))
with recorded() as variants:
    launch()
print([variant.name for variant in variants])
assert not _write_tables_kernel.device_caches[0][0], "this process compiled"
trust_constants()
with compiled(), compiled_here() as late:
    launch()
    with patch.object(tl.constexpr, "__ne__", side_effect=RuntimeError("a launch compares constants")):
        launch()
print(late)
"""

KEYS = """
import importlib, os, pkgutil
import kernels.gpu
from kernels.gpu.launch.compiler import stable_keys
from kernels.gpu.launch.trusted_constants import trust_constants
from triton import knobs
from triton.runtime.jit import JITFunction, JitFunctionInfo

stable_keys()
names = [module.name for module in pkgutil.walk_packages(kernels.gpu.__path__, "kernels.gpu.")]
modules = [importlib.import_module(name) for name in names]
functions = {
    f"{value.fn.__module__}.{name}": value
    for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)
}
if child := os.fork():  # before any key is known
    os.waitpid(child, 0)
    trust_constants()
keys = {}
for name in sorted(functions, reverse=child == 0):
    keys[name] = functions[name].cache_key
    if compiled := knobs.runtime.jit_post_compile_hook:
        compiled(fn=JitFunctionInfo("", name, functions[name]))
print(len(keys), sorted(keys.items()), flush=True)
"""


def environment(cache: Path) -> dict[str, str]:
    """Of a process that compiles."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.thorough
def test_what_a_run_launches_is_compiled_once(tmp_path: Path) -> None:
    """And not at all where the kernels come from an archive."""
    cache, other = tmp_path / "cache", tmp_path / "other"
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache), timeout=200)
    names = ["prefill_kernel", "_write_tables_kernel", "_copy_states_kernel", "_prepare_kernel", "dot_kernel"]
    names.append("_decode_kernel")
    assert done.stdout.splitlines() == ["6 0", str(names), "[]"], done.stderr
    assert len(list(cache.rglob("*.cubin"))) == 6
    _, manifest = pack(cache, tmp_path)
    assert (manifest.arch, manifest.kernels) == (90, 6)
    shutil.rmtree(cache)
    assert unpack_fitting(tmp_path, other, 90, manifest.triton) is not None
    done = subprocess.run(command, capture_output=True, text=True, env=environment(other), timeout=200)
    assert done.stdout.splitlines() == ["0 0", str(names), "[]"], done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engines",
    [
        ["none+mtp"],
        ["none+block"],
        ["none+prompts"],
        pytest.param(["fp8", "int4", "fp8+experts"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_every_launch_of_an_engine_is_compiled_ahead(tmp_path: Path, engines: list[str]) -> None:
    """Under the very keys that the launches of all layers and of the captures ask for."""
    command = [sys.executable, "-m", "tests.unit.engine.executors.cuda.warm_up_launches", *engines]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    for report in json.loads(done.stdout):
        assert report["asked"] > 50
        assert report["missed"] == [], report


def test_keys_of_kernels_depend_neither_on_what_was_launched_first_nor_on_trusted_constants(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEYS], capture_output=True, text=True, env=environment(tmp_path), timeout=200, check=True
    )
    one, other = done.stdout.splitlines()
    assert one == other
    assert int(one.split()[0]) > 50
