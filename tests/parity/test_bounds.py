"""Every access of a serving step's and of a training step's kernels stays inside the tensor that it is of, whichever
device the kernels are cut up for. Numbers are the other tests' business: here they only must not come from memory that
nobody wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import triton

from kernels.gpu.configs import KernelConfigs
from kernels.gpu.launch.device import named
from kernels.gpu.train.documents import Documents
from services.common.jobs import LoraSettings
from services.engine.executors.cuda import runner as runner_module
from services.engine.executors.cuda.buffers import StepShape
from services.engine.executors.cuda.graphs import StepGraphs, StepOutput
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.lora.upload import AdapterUpload
from services.engine.models.qwen3_5.training.adapters import WorkingAdapter
from services.engine.models.qwen3_5.training.trunk import EagerStep, Trunk
from services.engine.scheduler.scheduler import Scheduler
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.bounds import bounds_checked
from tests.parity.fused_models import TINY, cuda_runner, random_adapter, random_adapters, random_model
from tests.parity.test_fused import LIMITS, requests

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only the interpreter checks accesses")
SERVED = ("sm80", "sm86", "sm90")
"""One of each size of shared memory, as a Hopper card is held to its limits (TEMPER_DEVICE_LIMITS)."""
TRAINED = ("sm80", "sm86")
"""Of sm90 the tests of tests/kernels/gpu/train are."""


class _Launched(StepGraphs):
    """Captured steps without a GPU: padded as those are, and launched kernel by kernel."""

    def capture(self, shapes: Iterable[StepShape], *, adapters: bool) -> None:
        assert adapters
        self._shapes.update(dict.fromkeys(shapes))

    def replay(self, shape: StepShape, adapters: bool) -> StepOutput:
        self.replays += 1
        return self._run(shape, adapters)


def _kernels(architecture: str) -> KernelConfigs:
    """bfloat16 is cut up by device, float32 in one way for all."""
    return KernelConfigs(named("sm90").as_on(named(architecture)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", SERVED)
def test_serving(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded prefill and padded decodes with adapters in slots 2 and 4 of five; versions of a third are loaded in
    between, by the kernel that does it on a GPU."""
    monkeypatch.setattr(runner_module, "StepGraphs", _Launched)
    limits = replace(LIMITS, token_budget=70)
    model = random_model(TINY, torch.bfloat16, kernels=_kernels(architecture))
    lora = random_adapters(model, 5)
    lora._upload = AdapterUpload(lora.target_buffers(), lora._output_order, LoraSlots.upload_bytes(TINY, lora.max_rank))
    slots = [half for place in lora.target_buffers() for half in (place.a, place.b)]
    runner = cuda_runner(model, limits, lora, largest_graph=4)
    runner._graphs.capture(runner._shapes, adapters=True)
    scheduler = Scheduler(limits)
    for request in requests(17, 2, 1, tokens=2, adapters=(4, 0, 2)):
        scheduler.add(request)
    with bounds_checked(*slots) as checked:
        while scheduler.has_work:
            plan = scheduler.schedule(0.0)
            assert plan is not None
            result = runner.launch(plan).result()
            assert not any(token.error for token in result.tokens)
            scheduler.update(plan, result, 0.0)
            lora.load(3, random_adapter(TINY, 4, seed=9))
    assert runner.replays == 2
    assert checked.launches["_fill_kernel"] == 2
    assert checked.launches.keys() >= {"_decode_kernel", "_gated_delta_step_kernel", "_prefill_kernel", "dot_kernel"}


@pytest.mark.thorough
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("architecture", TRAINED)
def test_training(architecture: str, branches: bool) -> None:
    """Documents of one tile and of two, with room for another, as captured steps have; or that go on from others."""
    model = random_model(TINY, torch.bfloat16, kernels=_kernels(architecture))
    lora = LoraParams.create(TINY, LoraSettings(rank=4))
    documents = Documents.build([66, 1, 13], "cpu", room=4)
    if branches:
        device, past = torch.device("cpu"), TINY.conv_kernel - 1
        documents = Documents.branching([66, 1, 4, 9], [None, 0, 1, 0], device, past=past)
    with bounds_checked() as checked, torch.no_grad():
        adapter = WorkingAdapter(lora, TINY, model.dtype)
        trunk = Trunk(TINY, model.weights, model.rotation, documents, adapter)
        step = EagerStep(trunk, torch.arange(80) % 61, "selective", lambda: None)
        hidden = step.forward()
        step.backward(torch.ones_like(hidden))
    assert hidden.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in lora.parameters())
    assert checked.launches.keys() >= {"_scan_kernel", "_keys_kernel", "_queries_kernel", "_gradients_kernel"}
