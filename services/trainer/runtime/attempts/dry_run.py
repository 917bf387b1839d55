"""One claimed dry run: the job is prepared as it would be, looked at, and taken a step or two far. Only the report
stays.

A job that samples for itself is tried on a few of its prompts, for one round. What is measured is the engine as it is
now, with whatever else it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.jobs import ExampleJob, GrpoJob, JobProgress, OpdJob, TrainingSpec
from services.common.jobs.documents import Document
from services.common.jobs.dry_runs.guard_rails import BITS_A_PARAMETER, warnings
from services.common.jobs.dry_runs.report import (
    DataCounts,
    DryRunReport,
    ExpectedMemory,
    ExpectedTime,
    GroupRewards,
    RankCapacity,
    RewardSpread,
    Saturation,
    ShownDocument,
    Span,
)
from services.common.text.tokenizer import TextCodec
from services.trainer.jobs.adapter_run import TrainingRun
from services.trainer.jobs.base import RunData
from services.trainer.jobs.passes import Course, examination_of, steps_of
from services.trainer.parent_versions import ParentVersion
from services.trainer.runtime.attempts.facts import USUAL_BITS, bits, facts_of
from services.trainer.runtime.attempts.preparation import Notes, Preparation

_PROMPTS = 4
"""Prompts that a job which samples for itself is tried on."""
_STEPS = 2
"""Optimizer steps that are taken: the first one of a process also sets things up."""
_SHOWN, _GROUPS = 4, 16
_EDGE = 256
"""Tokens at the beginning and at the end of a long document that are shown."""
_PLAN = "the plan by which a job is admitted: an upper bound, counted from the model's shapes"
_CAPACITY = (
    f"{BITS_A_PARAMETER:g} bits a number (Allen-Zhu and Li, arXiv 2404.05405) against {{}}; "
    'after "LoRA Without Regret" (Thinking Machines, 2025)'
)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was found out by doing."""

    step_seconds: float
    tokens_per_second: float
    examined: dict[str, float]
    """Of the policy that the job starts from."""
    metrics: dict[str, float]
    """Of the last step."""
    right: tuple[float, str, int] | None
    steps: int


class DryRunAttempt(Preparation[TrainingSpec]):
    """Runs one claimed dry run, on the trainer's thread."""

    def run(self) -> Course[None]:
        """Writes the report into the job's record.

        Raises:
            JobLost, JobCancelled, Draining, NotBeside: it does not go on here.
            Exception: the job would fail.
        """
        session = self._claim.session
        self.check()
        with self._claim.trace.part("prepare"):
            parents = self.parents()
            run = self._trained(parents, self._spec)
        notes = Notes(session, run)
        notes.tell(*self.notes(run, parents))
        notes.record({})
        total, settings = run.total_steps, dict(run.settings)
        self._claim.report(JobProgress(step=0, total_steps=total), {})
        memory = _memory(run, self._parts.host.train_memory_bytes)
        tried = _tried(self._spec)
        if tried is not None:
            del run  # its place on the device is the next one's
            run = self._trained(parents, tried)
        found = yield from self._measure(run, sampled=tried is not None)
        facts = facts_of(
            self._spec,
            run,
            token_bits=_token_bits(found),
            saturation=None if found.right is None else found.right[0],
        )
        said = warnings(facts)
        notes.tell(*said)
        report = DryRunReport(
            counts=_counts(self._spec, run.data()),
            samples=_samples(run.data(), self._parts.host.codec),
            rewards=_rewards(run.data()),
            time=_time(self._spec, run.data(), found, total, settings),
            memory=memory,
            capacity=None
            if facts.parameters is None or facts.data_bits is None
            else RankCapacity(
                parameters=facts.parameters,
                capacity_bits=BITS_A_PARAMETER * facts.parameters,
                data_bits=facts.data_bits,
                basis=_CAPACITY.format(_basis_of_bits(self._spec)),
            ),
            saturation=None
            if found.right is None
            else Saturation(share=found.right[0], of=found.right[1], measured=found.right[2]),
            warnings=said,
        )
        notes.record(found.metrics, report.model_dump_json())

    def _trained(self, parents: Sequence[ParentVersion], spec: TrainingSpec) -> TrainingRun:
        run = self.prepared(parents, spec)
        if not isinstance(run, TrainingRun):
            raise InvalidRequest(f"a job of kind {spec.kind} has no dry run", param="dry_run")
        return run

    def _measure(self, run: TrainingRun, *, sampled: bool) -> Course[_Measured]:
        """Takes the first steps of a run that is thrown away.

        Args:
            sampled: what is right is known after the first step only.
        """
        pauses = self._claim.pauses()
        examined = yield from examination_of(run, pauses)
        right = None if sampled else run.right_already(pauses)
        took, metrics = 0.0, dict[str, float]()
        steps = min(1 if sampled else _STEPS, run.total_steps)
        for index in range(steps):
            self._claim.session.check()
            began = time.monotonic()
            metrics = yield from steps_of(run, index, pauses)
            took = time.monotonic() - began
        if sampled:
            right = run.right_already(pauses)
        if right is None and "teacher_agreement" in metrics:
            tokens = int(metrics.get("tokens", 0))
            right = metrics["teacher_agreement"], "tokens that the teacher would choose, too", tokens
        return _Measured(took, metrics.get("tokens_per_second", 0.0), examined, metrics, right, steps)


def _tried(spec: TrainingSpec) -> TrainingSpec | None:
    """The first round of a job that samples for itself, with few prompts and nothing held out; None: another job."""
    if isinstance(spec, GrpoJob) and spec.generate is not None:
        made = spec.generate
        few = min(_PROMPTS, made.round_prompts)
        less = {"rounds": 1, "prompts_per_round": few, "eval_prompts": [], "eval_every": None}
        return spec.model_copy(update={"generate": made.model_copy(update=less), "epochs": 1, "groups_per_step": None})
    if isinstance(spec, OpdJob):
        few = min(_PROMPTS, spec.round_prompts)
        less = {"rounds": 1, "prompts_per_round": few, "prompts_per_step": None, "epochs": 1}
        return spec.model_copy(update={**less, "eval_prompts": [], "eval_every": None})
    return None


def _token_bits(found: _Measured) -> float:
    """Bits that a trained token has for the policy that the job starts from, as far as that was measured."""
    nats = found.examined.get("loss") if "token_accuracy" in found.examined else found.metrics.get("divergence")
    return USUAL_BITS if nats is None else bits(nats)


def _basis_of_bits(spec: TrainingSpec) -> str:
    if spec.kind == "sft":
        return "the loss of the policy that the job starts from on a sample of its trained tokens"
    if spec.kind == "opd":
        return "the divergence from the teacher on the tokens tried, at max_tokens each"
    return "at most one bit a preference or a rollout"


def _counts(spec: TrainingSpec, data: RunData) -> DataCounts:
    documents = [document for unit in data.units for document in unit]
    given, held_out = len(data.rewards) or len(data.units), data.held_out
    if isinstance(spec, ExampleJob):
        given = len(spec.split[0])
    unit, kept = data.unit, len(data.units)
    if isinstance(spec, GrpoJob) and spec.generate is not None:
        unit, given, held_out = "prompt", len(spec.generate.prompts), len(spec.generate.eval_prompts)
    elif isinstance(spec, OpdJob):
        given, held_out = len(spec.prompts), len(spec.eval_prompts)
    return DataCounts(
        unit=unit,
        given=given,
        kept=kept,
        dropped=0 if unit == "prompt" else given - kept,
        truncated=sum(document.truncated for document in documents),
        held_out=held_out,
        documents=len(documents),
        tokens=sum(document.length for document in documents),
        trained_tokens=sum(document.num_trained for document in documents),
        longest=max((document.length for document in documents), default=0),
    )


def _samples(data: RunData, codec: TextCodec) -> list[ShownDocument]:
    """Documents of units that are spread evenly."""
    count = min(_SHOWN, len(data.units))
    chosen = [data.units[place * len(data.units) // count] for place in range(count)]
    return [_shown(document, codec) for unit in chosen for document in unit[:2]]


def _shown(document: Document, codec: TextCodec) -> ShownDocument:
    places = list(range(document.length))
    cut = document.length > 2 * _EDGE
    if cut:
        places = [*places[:_EDGE], *places[-_EDGE:]]
    spans: list[Span] = []
    run: list[int] = []
    for here, place in enumerate(places):
        run.append(document.token_ids[place])
        ends = here + 1 == len(places) or (cut and here + 1 == _EDGE)
        if ends or document.trained[places[here + 1]] != document.trained[place]:
            spans.append(Span(text=codec.decode(run, skip_special=False), trained=document.trained[place]))
            run = []
    return ShownDocument(
        source=document.source, tokens=document.length, trained_tokens=document.num_trained, spans=spans, cut=cut
    )


def _rewards(data: RunData) -> RewardSpread | None:
    if not data.rewards:
        return None
    everything = [reward for rewards in data.rewards for reward in rewards]
    by_group = [
        GroupRewards(
            completions=len(rewards),
            mean=statistics.fmean(rewards),
            std=statistics.pstdev(rewards),
            least=min(rewards),
            most=max(rewards),
        )
        for rewards in data.rewards[:_GROUPS]
    ]
    return RewardSpread(
        mean=statistics.fmean(everything),
        std=statistics.pstdev(everything),
        groups=len(data.rewards),
        groups_skipped=data.groups_skipped,
        by_group=by_group,
    )


def _time(spec: TrainingSpec, data: RunData, found: _Measured, total: int, settings: dict[str, float]) -> ExpectedTime:
    if isinstance(spec, OpdJob) or (isinstance(spec, GrpoJob) and spec.generate is not None):
        rounds, prompts = (
            (spec.rounds, spec.round_prompts)
            if isinstance(spec, OpdJob)
            else (spec.generate.rounds, spec.generate.round_prompts)
            if spec.generate is not None
            else (0, 0)
        )
        tried = min(_PROMPTS, prompts)
        # The round was trained on once; what it sampled is trained on again.
        again = (spec.epochs - 1) * found.metrics.get("train_seconds", 0.0)
        more = f", and {again:.3g} s more for {spec.epochs} epochs of it" if again else ""
        return ExpectedTime(
            seconds=(found.step_seconds + again) * rounds * prompts / tried,
            steps=total,
            basis=f"one round with {tried} of {prompts} prompts took {found.step_seconds:.3g} s on this engine{more}: "
            "an upper bound, for larger rounds are sampled faster; without evaluations",
        )
    tokens = sum(document.length - 1 for unit in data.units for document in unit)
    passes = settings.get("epochs", getattr(spec, "epochs", None) or 1)
    rate = found.tokens_per_second
    seconds = tokens * passes / rate if rate > 0 else found.step_seconds * total
    return ExpectedTime(
        seconds=seconds,
        steps=total,
        basis=f"{rate:.0f} tokens a second in step {found.steps} of {total}, taken on this engine just now, for "
        f"{passes:g} passes over {tokens} tokens; without evaluations",
    )


def _memory(run: TrainingRun, available: int) -> ExpectedMemory:
    plan = run.memory
    return ExpectedMemory(
        needed=plan.total,
        available=available,
        adapter=plan.adapter,
        activations=plan.activations,
        logits=plan.logits,
        teacher=plan.teacher,
        basis=_PLAN,
    )
