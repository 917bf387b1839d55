"""Fixtures for tests of the whole system."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import pytest
import structlog
from hypothesis import settings

from cli.local.ports import claim_ports
from kernels.gpu.launch import device
from tests.costs import Recorder, seconds
from tests.stack import Stack
from tests.thorough import mark_thorough

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# Collecting tests makes millions of objects that stay: modules, models of APIs, items. Nothing looks for garbage among
# them meanwhile, nor after pytest_collection_finish.
gc.disable()

# A busy machine must not fail a property: hypothesis would hold every example to 200 ms.
settings.register_profile("temper", deadline=None)
settings.load_profile("temper")


class _Output:
    """What is sys.stdout when something is written.

    structlog's own logger calls print(), which in CPython up to 3.12 takes sys.stdout without holding it: a server in a
    thread of a test crashes the process if pytest exchanges it at that moment.
    """

    def write(self, text: str) -> int:
        with suppress(ValueError):  # the test whose output it was has ended
            return sys.stdout.write(text)
        return 0

    def flush(self) -> None:
        with suppress(ValueError):
            sys.stdout.flush()


# Tracebacks as Python prints them: one that is drawn, with the values of all variables, takes a second of a processor.
_PLAIN = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(
    processors=[*structlog.get_config()["processors"][:-1], _PLAIN],
    logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Output())),
)


if forced := os.environ.get("TEMPER_DEVICE_LIMITS"):
    # All kernels of the tests are cut up as an engine's are under this setting.
    read = device._read
    device._read = lambda which: read(which).as_on(device.named(forced))

if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Without a GPU Triton kernels run in Triton's interpreter; read when the kernels' modules are imported.
    os.environ["TRITON_INTERPRET"] = "1"

# An engine of a test computes on one core, as its test does. By itself it would take all of them, and leave that to the
# tests after it: with a worker a core, threads that wait for each other burn ten times what the work takes.
os.environ["TEMPER_TORCH_THREADS"] = "1"


WHOLE = ("tests/e2e/", "tests/conformance/", "tests/browser/")
"""Tests of a whole Temper."""
SHARING = ("tests/conformance/clients/", *WHOLE)
"""Directories of those that share a running one, one after the other."""
OWN = tuple(f"tests/e2e/test_{name}.py" for name in ("demo", "failures", "guides", "manifest", "traces"))
"""Those of them that start what they need, and leave the shared stack alone."""
APART = ("tests/kernels/compile_table/test_table.py", "tests/unit/engine/executors/cuda/test_compile_ahead.py")
"""Files whose tests take long, each in a process of its own, and set nothing up together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-costs", action="store_true", help="write what each file took to tests/costs.tsv")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-costs") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def _scope(nodeid: str) -> str:
    """What a worker takes at a time: a file, so that what it sets up is set up once; of files that are APART each test
    alone, and of those that share a running Temper a whole directory."""
    if nodeid.startswith(APART):
        return nodeid
    sharing = () if nodeid.startswith(OWN) else SHARING
    return next((place for place in sharing if nodeid.startswith(place)), nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """With `pytest -n`, a worker takes a scope at a time, the most expensive first. Two workers at a time have tests of
    a whole Temper: more processes would be in each other's way. Which two is not said, so that neither is left with
    what the other could help with."""
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class TwoWholeAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

        def _assign_work_unit(self, node: WorkerController) -> None:
            others = [work for other, work in self.assigned_work.items() if other is not node]
            if sum(any(_goes_on(*unit) for unit in work.items()) for work in others) >= 2:
                # With nothing else left, a third helps: nobody else needs the processors.
                other = next((scope for scope in self.workqueue if not scope.startswith(WHOLE)), None)
                if other is not None:
                    self.workqueue.move_to_end(other, last=False)
            super()._assign_work_unit(node)

    def _goes_on(scope: str, tests: dict[str, bool]) -> bool:
        return scope.startswith(WHOLE) and not all(tests.values())

    config.option.loadscopereorder = False  # the order is that of the collection: by cost
    return TwoWholeAtATime(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the marks that it was told to leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts what takes long first, so that at the end of a run no worker is left alone with a long file. Tests marked
    `cuda` belong to machines with a GPU; elsewhere they are not part of the suite."""
    mark_thorough(items)
    files = frozenset(item.nodeid.partition("::")[0] for item in items)
    costs = {scope: seconds(scope, files) for scope in {_scope(item.nodeid) for item in items}}
    items.sort(key=lambda item: -costs[_scope(item.nodeid)])
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


SHARED = pytest.StashKey[Stack]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stops the shared Temper when tests come that have no use for it: idle, it takes a tenth of a processor."""
    shared = item.config.stash.get(SHARED, None)
    if shared is None:
        return
    asked_for = isinstance(item, pytest.Function) and "stack" in item.fixturenames
    if item.nodeid.startswith(OWN) or not (asked_for or item.nodeid.startswith(WHOLE)):
        shared.stop()
    elif asked_for and shared.process is None:
        shared.start()


@pytest.fixture(scope="session")
def stack(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One running Temper for all tests that leave it as they found it (their own adapters, nothing attached)."""
    # Tests compare numbers with float32 references, also on a GPU, where the default is the checkpoint's dtype.
    # And headers with errors and versions, which a stream has only if it waits for its first token.
    (metrics,) = claim_ports(1)
    env = {
        "TEMPER_DTYPE": "float32",
        "TEMPER_STREAM_START_SECONDS": "15",
        "TEMPER_METRICS_PORT": str(metrics.number),
        "TEMPER_ADAPTERS_DIR": str(tmp_path_factory.mktemp("adapters")),
    }
    with Stack(tmp_path_factory.mktemp("stack") / "data", env=env) as running:
        pytestconfig.stash[SHARED] = running
        yield running


@pytest.fixture
def unattached(stack: Stack) -> Iterator[None]:
    """Of a test that attaches adapters: however it ends, the tests after it find none attached."""
    yield
    stack.detach()
