"""Draft jobs on a random model: learning, accumulation, evaluation, resume, limits, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from models.tiny.recipe.data import DIRECTORY
from services.common.adapters.drafter_form import DrafterForm
from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS, drafter_form
from services.common.adapters.names import AdapterVersion
from services.common.errors import DoesNotFit, InvalidRequest, ModelNotFound
from services.common.jobs import DraftJob
from services.engine.models.weights.drafter import read_drafter
from services.trainer.jobs import prepare_run
from services.trainer.jobs.draft import DraftRun
from tests.training_support import TrainingHost, random_adapter, random_drafter, through_a_checkpoint, without_times

EXAMPLES = [{"prompt": f"What is {n} + {n}?", "completion": f"The answer is {2 * n}."} for n in range(6)]


def prepared(host: TrainingHost, parent: Mapping[str, bytes] | None = None, **fields: Any) -> DraftRun:
    defaults = {
        "adapter": "sharp",
        "examples": EXAMPLES,
        "epochs": 2,
        "batch_size": 4,
        "learning_rate": 0.003,
        "max_tokens_per_microbatch": 128,
    }
    spec = DraftJob.model_validate(defaults | fields)
    run = prepare_run(spec, host, random_drafter(host) if parent is None else parent)
    assert isinstance(run, DraftRun)
    return run


def gradients(run: DraftRun) -> dict[str, torch.Tensor]:
    """What a step of learning rate 1 without moments has changed."""
    return {name: tensor.detach().clone() for name, tensor in run._tensors.items()}


def test_it_learns_what_the_model_says(host: TrainingHost) -> None:
    run = prepared(host, epochs=12, eval_examples=EXAMPLES[:2], depth=2)
    before = run.examine()
    history = [run.step(index) for index in range(run.total_steps)]
    after = run.examine()
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert after["acceptance"] > before["acceptance"] + 0.2
    assert after["acceptance_2"] > before["acceptance_2"] + 0.2
    assert {"loss", "acceptance", "acceptance_2", "grad_norm", "learning_rate", "num_tokens"} <= history[0].keys()
    evaluated = [metrics for metrics in history if "eval_loss" in metrics]
    assert len(evaluated) == 12
    assert evaluated[-1]["eval_acceptance"] == pytest.approx(after["acceptance"])
    assert not host.gate.inside
    assert host.gate.gave_way > 0


def test_a_block_drafter_begins_as_the_layer_and_learns_its_block(host: TrainingHost) -> None:
    """Those of further layers and places are random, as a function of the seed; the next version goes on from it."""
    run = prepared(host, epochs=10, eval_examples=EXAMPLES[:2], form="block", block=3, layers=2)
    assert run.files("model") == prepared(host, form="block", block=3, layers=2).files("model")
    assert run.examine()["acceptance"] == prepared(host, eval_examples=EXAMPLES[:2], depth=1).examine()["acceptance"]
    before = run.examine()
    history = [run.step(index) for index in range(run.total_steps)]
    after = run.examine()
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    for place in ("acceptance", "acceptance_2", "acceptance_3"):
        assert after[place] > before[place] + 0.2, place
    files = run.files("model")
    assert drafter_form(files[DRAFTER_CONFIG]) == DrafterForm(3, 2)
    further = prepared(host, files, eval_examples=EXAMPLES[:2])
    assert further.examine() == after
    assert drafter_form(further.files("model")[DRAFTER_CONFIG]) == DrafterForm(3, 2)
    for fields in ({"form": "mtp"}, {"form": "block", "block": 4}, {"form": "block", "layers": 1}):
        with pytest.raises(InvalidRequest, match="a block drafter of 3 tokens in 2 layers, and it is to make"):
            prepared(host, files, **fields)
    with pytest.raises(InvalidRequest, match="depth is of the mtp layer"):
        prepared(host, files, depth=2)


def test_an_adapter_is_what_it_learns_to_propose_for(host: TrainingHost) -> None:
    host.published[AdapterVersion("shifted", 1)] = random_adapter(host, scale=0.3)
    losses = [prepared(host, target=target).examine()["loss"] for target in ("base", "shifted@1")]
    assert abs(losses[0] - losses[1]) > 0.01

    def missing(version: AdapterVersion) -> Mapping[str, bytes]:
        raise ModelNotFound(f"adapter version {version} does not exist")

    host.adapter_files = missing  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="target: adapter version gone@1"):
        prepared(host, target="gone@1")


def test_a_step_does_not_depend_on_the_microbatches(host: TrainingHost) -> None:
    results = []
    for limit in (40, 512):
        run = prepared(host, batch_size=6, max_tokens_per_microbatch=limit, depth=2)
        entered = host.gate.entered
        metrics = without_times(run.step(0))
        results.append((metrics, gradients(run), host.gate.entered - entered))
    (one, first, many), (other, second, few) = results
    assert many > few
    assert one == pytest.approx(other, rel=1e-4)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_resumed_job_ends_with_the_same_bits(host: TrainingHost) -> None:
    whole = prepared(host)
    curve = [without_times(whole.step(index)) for index in range(whole.total_steps)]
    stopped = prepared(host)
    stopped.step(0)
    saved = through_a_checkpoint(stopped.state())
    resumed = prepared(host)
    start = resumed.load_state(saved)
    rest = [without_times(resumed.step(index)) for index in range(start, resumed.total_steps)]
    assert rest == curve[start:]
    assert resumed.files("model") == whole.files("model")
    with pytest.raises(InvalidRequest, match="another job"):
        prepared(host, seed=1).load_state(saved)


def test_an_interrupted_step_leaves_nothing(host: TrainingHost) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    run, untouched = prepared(host), prepared(host)
    with pytest.raises(Stop):
        run.step(0, stop)
    assert not host.gate.inside
    assert without_times(run.step(0)) == without_times(untouched.step(0))
    assert run.files("model") == untouched.files("model")


def test_its_files_are_a_drafter_of_this_model(host: TrainingHost) -> None:
    run = prepared(host)
    run.step(0)
    found = read_drafter(run.files("model"), host.model.config, host.base_digest)
    assert all(torch.equal(found[name], tensor) for name, tensor in run._tensors.items())
    assert run.lora is None
    assert run.lineage is None


def test_a_new_one_starts_from_the_layer_of_the_checkpoint(host: TrainingHost) -> None:
    spec = DraftJob.model_validate({"adapter": "sharp", "examples": EXAMPLES})
    with pytest.raises(InvalidRequest, match="no mtp layer to begin with"):
        prepare_run(spec, host, None)
    run = prepare_run(spec, TrainingHost(DIRECTORY), None)
    found = load(run.files("model")[DRAFTER_WEIGHTS])
    own = load_file(DIRECTORY / "model-mtp.safetensors")
    assert {name: tensor.float().tolist() for name, tensor in own.items()} == {
        name: tensor.tolist() for name, tensor in found.items()
    }


def test_a_job_that_does_not_fit_says_what_would(checkpoint: Any) -> None:
    small = TrainingHost(checkpoint, train_memory_bytes=2**18)
    with pytest.raises(DoesNotFit, match="max_tokens_per_microbatch, depth or block"):
        prepared(small)


def test_answers_of_one_token_teach_nothing(host: TrainingHost) -> None:
    with pytest.raises(InvalidRequest, match="two tokens or more"):
        prepared(host, examples=[{"text": "a"}])
