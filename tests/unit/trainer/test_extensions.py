"""A new kind of job, a new loss of GRPO and a new scorer need the files that the documentation names, and no others:
each is added to a copy of the services, as its author would add it, and used there by a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

KIND = """
from typing import Literal
from services.common.jobs.kinds.sft import SftJob

class ImitationJob(SftJob):
    "Supervised fine-tuning in which a token counts twice."
    kind: Literal["imitation"] = "imitation"
"""
KIND_RUN = """
from services.trainer.jobs.sft import SftRun

class ImitationRun(SftRun):
    def add_gradients(self, loss):
        super().add_gradients(2 * loss)

prepare = ImitationRun.prepare
"""
KIND_USED = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from cli.main import app
from services.common.jobs import JOBS
from services.gateway.server.app import create_app
from services.gateway.settings import GatewaySettings
from services.trainer.jobs import prepare_run
from tests.training_support import TrainingHost

examples = [{"prompt": f"What is {n}?", "completion": str(n)} for n in range(4)]
job = {"adapter": "a", "examples": examples, "epochs": 3, "learning_rate": 0.01, "lora": {"rank": 4}}
ways = {}
for kind in ("sft", "imitation"):
    run = prepare_run(JOBS[kind].model_validate(job | {"kind": kind}), TrainingHost(Path(sys.argv[1])), None)
    ways[kind] = [run.step(index) for index in range(run.total_steps)]
print(json.dumps({
    "loss": [step["loss"] for step in ways["imitation"]],
    "norms": [ways[kind][0]["grad_norm"] for kind in ("sft", "imitation")],
    "routes": [path for path in create_app(GatewaySettings()).openapi()["paths"] if path.endswith("imitation")],
    "help": CliRunner().invoke(app, ["train", "submit", "--help"], env={"COLUMNS": "300"}).output,
}))
"""

LOSS = """
from services.trainer.losses.policy import PolicyLossType, Surrogate
import torch

def unclipped(tokens):
    nothing = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return Surrogate(-tokens.ratio * tokens.advantages, tokens.ratio, nothing, nothing)

PLAIN = PolicyLossType(unclipped)
"""
LOSS_USED = """
import json, sys
from pathlib import Path
from services.common.jobs import GrpoJob
from services.trainer.jobs import prepare_run
from tests.training_support import TrainingHost

host = TrainingHost(Path(sys.argv[1]))
prompt = host.codec.encode("question")
completions = [
    # Sampled by another policy, far enough away that dapo's bounds hold back every token, whichever way it would go.
    {"token_ids": [10 + n, 20, 30], "logprobs": [-0.001 - 20 * (n % 2)] * 3, "reward": n % 2, "truncated": True}
    for n in range(4)
]
norms = []
for name in ("dapo", "plain"):
    job = GrpoJob.model_validate({
        "adapter": "a", "loss_type": name, "lora": {"rank": 4}, "mismatch_correction": "none",
        "groups": [{"prompt_token_ids": prompt, "completions": completions}],
    })
    norms.append(prepare_run(job, host, None).step(0)["grad_norm"])
print(json.dumps({"norms": norms, "clip": [job.clip_low, job.clip_high]}))
"""

SCORER = """
from typing import Literal
from services.common.jobs.scorers.base import ScorerSpec

class CharsReward(ScorerSpec):
    type: Literal["characters"] = "characters"

    def scorer(self, where, grants):
        return self

    def score(self, samples, interrupt):
        return [float(len(sample.text)) for sample in samples]
"""
SCORER_USED = """
import json
from services.common.jobs import GrpoJob
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import Sample

job = GrpoJob.model_validate({
    "adapter": "a",
    "generate": {
        "prompts": [{"prompt": "Say something."}], "rounds": 1, "max_tokens": 8,
        "reward": [{"type": "characters", "weight": 2}],
    },
})
samples = [Sample("", text, tokens=1) for text in ("", "four")]
print(json.dumps(Rewards(job.generate.reward, None).score(samples)))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every copy, one after the other: what Python has compiled of one it takes for the next."""
    return tmp_path_factory.mktemp("copy")


@pytest.fixture
def services(place: Path) -> Iterator[Path]:
    """A copy of the services, which comes before the project's own in `used`."""
    copy = shutil.copytree(ROOT / "services", place / "services", ignore=shutil.ignore_patterns("__pycache__"))
    yield copy
    shutil.rmtree(copy)


def replaced(path: Path, old: str, new: str) -> None:
    """Changes one place of a file."""
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def used(services: Path, script: str, *arguments: object) -> Any:
    """What a process prints that finds these services."""
    path = os.pathsep.join([str(services.parent), str(ROOT)])
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=services.parent, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_a_kind_of_job_is_two_modules_and_a_line(services: Path, checkpoint: Path) -> None:
    (services / "common/jobs/kinds/imitation.py").write_text(KIND)
    (services / "trainer/jobs/imitation.py").write_text(KIND_RUN)
    registry = services / "common/jobs/registry.py"
    replaced(
        registry, "import SftJob\n", "import SftJob\nfrom services.common.jobs.kinds.imitation import ImitationJob\n"
    )
    replaced(registry, "TrainingSpec: TypeAlias = SftJob", "TrainingSpec: TypeAlias = ImitationJob | SftJob")
    told = used(services, KIND_USED, checkpoint)
    assert told["loss"][-1] < told["loss"][0]
    assert told["norms"][1] == pytest.approx(2 * told["norms"][0], rel=1e-4)
    assert told["routes"] == ["/v1/train/imitation"]
    assert "imitation" in told["help"]


@pytest.mark.thorough
def test_a_loss_of_grpo_is_a_module_and_a_line(services: Path, checkpoint: Path) -> None:
    (services / "trainer/losses/plain.py").write_text(LOSS)
    line = '    "plain": LossTypeSpec("services.trainer.losses.plain:PLAIN", clip=(0.1, 0.5)),\n'
    replaced(services / "common/jobs/kinds/loss_types.py", '    "grpo": ', line + '    "grpo": ')
    told = used(services, LOSS_USED, checkpoint)
    clipped, plain = told["norms"]
    assert clipped == 0
    assert plain > 1
    assert told["clip"] == [0.1, 0.5]


def test_a_scorer_is_a_module_and_a_line(services: Path) -> None:
    (services / "common/jobs/scorers/chars.py").write_text(SCORER)
    registry = services / "common/jobs/scorers/registry.py"
    replaced(
        registry,
        "import Sample\n",
        "import Sample\nfrom services.common.jobs.scorers.chars import CharsReward\n",
    )
    replaced(registry, "_Any: TypeAlias = (\n    RegexReward", "_Any: TypeAlias = (\n    CharsReward | RegexReward")
    assert used(services, SCORER_USED) == [0.0, 8.0]
