"""Training of a drafter: the mtp layer learns what the model itself says of the token after next.

The model is frozen, with an adapter if the job names one, and reads each document. From its hidden state at a token
and the next token the layer proposes the one after. The loss is the divergence KL(model ‖ layer) of the layer's
distribution from the model's own there, so that a draft token is as often as possible the one that will be drawn, at
every temperature. With a depth above 1 the layer goes on from its own output, as in a chain of draft tokens. A block
drafter proposes all tokens of its block from the same place, and those further back count less: what is behind a wrong
draft token is of no use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from services.common.adapters.drafter_form import MOST_CHAINED
from services.common.adapters.manifest import DRAFTER_CONFIG, drafter_form
from services.common.errors import InvalidRequest
from services.common.jobs import DraftJob
from services.common.jobs.documents import Document, completion_document, placed
from services.common.jobs.fields.drafter import DraftExample
from services.common.jobs.kinds.draft import as_sft, asked_ids
from services.engine.models.weights.drafter import drafter_files, grown, read_drafter
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSampling
from services.trainer.jobs.adapter_run import under
from services.trainer.jobs.example_run import ExampleRun, both_parts
from services.trainer.jobs.sft import sft_documents
from services.trainer.losses import divergence_loss
from services.trainer.memory.estimate import DrafterWork, TeacherWork, TrainingMemory, check_drafter_fits
from services.trainer.packing import Microbatch, overlong, some
from services.trainer.sampling.teacher import Teacher

_MASTERS = "drafter."
_FALL = 2.0
"""The last places of a block count by exp(-2) as much as the first one (cf. the loss of DFlash, arXiv 2602.06036)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a microbatch at which one token of a chain is learnt."""

    proposing: Tensor
    """[N] int64, rows of the layer."""
    deciding: Tensor
    """[N] int64: rows of the model whose distributions are those of the same tokens."""

    @classmethod
    def of(cls, microbatch: Microbatch, depth: int) -> _Rows:
        """Args: depth: tokens of the chain before this one."""
        starts = torch.tensor([0, *microbatch.lengths[:-1]], device=microbatch.rows.device).cumsum(0)
        proposing = microbatch.rows - 1 - depth
        inside = proposing >= starts[microbatch.row_documents]
        return cls(proposing[inside], microbatch.rows[inside])


def _learnable(document: Document) -> bool:
    """True if a token is trained that stands two behind another one."""
    return any(document.trained[2:])


def _documents(
    host: PolicyHost,
    spec: DraftJob,
    interrupt: Callable[[], None],
    examples: Sequence[tuple[int, DraftExample]],
    field: str,
) -> tuple[list[list[Document]], list[str]]:
    """Documents of each example, and notes: those that have no answer are answered by the target first.

    Args:
        interrupt: called several times a second meanwhile; may raise.

    Raises:
        InvalidRequest: an example cannot be rendered, or none has anything to learn from.
        Unavailable, DeadlineExceeded: the engine does not answer.
    """
    read = [(index, as_sft(example)) for index, example in examples]
    answered = [(index, example) for index, example in read if example is not None]
    found, notes = sft_documents(host, spec, answered, field) if answered else ([], [])
    asked = [(index, example) for index, example in examples if not example.answered]
    if asked:
        said, more = _answers(host, spec, interrupt, asked, field)
        found, notes = found + said, notes + more
    kept = [learnt for documents in found if (learnt := [one for one in documents if _learnable(one)])]
    if not kept:
        raise InvalidRequest(
            f"none of the {field} has an answer of two tokens or more: there is no token after next to propose",
            param=field,
        )
    return kept, notes


def _answers(
    host: PolicyHost,
    spec: DraftJob,
    interrupt: Callable[[], None],
    asked: Sequence[tuple[int, DraftExample]],
    field: str,
) -> tuple[list[list[Document]], list[str]]:
    """The same of prompts. The seeds are the job's, so a resumed one has equal answers."""
    requests, sources, dropped = [], [], []
    for index, example in asked:
        with placed(f"{field}[{index}]"):
            prompt = tuple(asked_ids(host.codec, spec, example))
        room = host.max_train_tokens - len(prompt) - spec.max_tokens
        if room < 0 and spec.overlong != "error":
            dropped.append(index)
            continue
        if room < 0:
            limit = host.max_train_tokens
            raise overlong(f"{field}[{index}]", limit - room, limit, "shorten it, or lower max_tokens")
        host.rollouts.check(len(prompt), spec.max_tokens)
        requests.append(RolloutRequest(prompt, spec.seed + index))
        sources.append(index)
    sampling = RolloutSampling(spec.temperature, spec.max_tokens)
    said: list[Completion] = []
    if requests:
        said = host.rollouts.generate(requests, sampling, spec.target_version, interrupt=interrupt, gentle=True)
    documents = [
        [completion_document(request.prompt, completion.token_ids, index)]
        for request, completion, index in zip(requests, said, sources, strict=True)
    ]
    notes = [f"{len(said)} of the {field} were answered by {spec.target} first"] if said else []
    if dropped:
        notes.append(f"{len(dropped)} prompts with too little room for an answer dropped: {field} {some(dropped)}")
    return documents, notes


class DraftRun(ExampleRun):
    """A prepared draft job; see `prepare`."""

    def __init__(
        self,
        spec: DraftJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        teacher: Teacher,
        examples: Sequence[Sequence[Document]],
        held_out: Sequence[Sequence[Document]],
        notes: Sequence[str],
    ) -> None:
        self._job = spec
        self._teacher = teacher
        super().__init__(spec, host, parent, examples=examples, held_out=held_out, notes=notes)

    @classmethod
    def prepare(
        cls,
        spec: DraftJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        interrupt: Callable[[], None] = lambda: None,
    ) -> DraftRun:
        """Tokenizes and sizes the job, once the target has answered what has no answer.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected, Unavailable: as `prepare_run` says.
        """
        teacher = Teacher.of_version(spec.target_version, host, "target")
        examples, held_out, notes = both_parts(spec.split, partial(_documents, host, spec, interrupt))
        return cls(spec, host, parent, teacher=teacher, examples=examples, held_out=held_out, notes=notes)

    @property
    def lora(self) -> None:
        """See JobRun.lora."""

    def files(self, base_model_name: str) -> dict[str, bytes]:
        """See JobRun.files."""
        dtype = self._host.model.dtype
        # Norms are few, and the model computes with them in float32.
        tensors = {name: one if one.ndim == 1 else one.to(dtype) for name, one in self._tensors.items()}
        provenance = {"model": base_model_name, "target": self._job.target, "steps": self._finished}
        return drafter_files(tensors, self._host.base_digest, provenance, self._form)

    def _to_examine(self) -> list[Sequence[Document]]:
        """Where examples are held out, those."""
        return list(self._held_out) or super()._to_examine()

    def _first_masters(self, parent: Mapping[str, bytes] | None, teacher: TeacherWork | None) -> TrainingMemory:
        model = self._host.model
        if parent is None:
            self._form = self._job.form_from(None)
            tensors = dict(self._host.checkpoint_drafter())
        else:
            self._form = self._job.form_from(drafter_form(parent[DRAFTER_CONFIG]))
            found = read_drafter(parent, model.config, self._host.base_digest)
            tensors = {name: tensor.to(torch.float32, copy=True) for name, tensor in found.items()}
        self._tensors = grown(tensors, model.config.drafter_shapes(self._form), self._job.seed)
        count = self._form.block or self._job.depth or MOST_CHAINED
        falls = [math.exp(-place * _FALL / count) if self._form.block else 1.0 for place in range(count)]
        self._shares = [one / sum(falls) for one in falls]
        work = DrafterWork(
            numbers=sum(tensor.numel() for tensor in self._tensors.values()),
            tokens=self._largest,
            itemsize=model.dtype.itemsize,
            fused=model.device.type == "cuda",
            depth=len(self._shares),
            layers=self._form.layers,
            target=teacher or self._teacher.work,
        )
        return check_drafter_fits(model.config, work, self._host.train_memory_bytes)

    def _place(self) -> list[Tensor]:
        device = self._host.model.device
        self._tensors = {name: one.to(device).requires_grad_() for name, one in sorted(self._tensors.items())}
        return list(self._tensors.values())

    def _make_forwards(self) -> None:
        self._target = self._teacher.within(self._graphs, self._largest)

    def _masters(self) -> dict[str, Tensor]:
        return {_MASTERS + name: one.detach().to("cpu", copy=True) for name, one in self._tensors.items()}

    @torch.no_grad()
    def _load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        found = under(_MASTERS, tensors)
        if {name: one.shape for name, one in found.items()} != {n: one.shape for n, one in self._tensors.items()}:
            raise ValueError("its tensors are others than the drafter's")
        for name, one in self._tensors.items():
            one.copy_(found[name])

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        documents = [document for example in self.chosen(index) for document in example]
        microbatches = self._pack(documents)
        totals = self._totals(microbatches)
        sums = torch.zeros(2, len(self._shares), device=self._host.model.device)
        for microbatch in microbatches:
            interrupt()
            with self._host.gate.training():
                with self.watch.part("forward"):
                    loss = self._compare(microbatch, totals, sums)
                self.add_gradients(loss)
        return self._metrics(sums), sum(microbatch.num_tokens for microbatch in microbatches)

    def _evaluate(self, examples: Sequence[Sequence[Document]], interrupt: Callable[[], None]) -> dict[str, float]:
        microbatches = self._pack([document for example in examples for document in example])
        totals = self._totals(microbatches)
        sums = torch.zeros(2, len(self._shares), device=self._host.model.device)
        for microbatch in microbatches:
            interrupt()
            with self._host.gate.training(), torch.no_grad():
                self._compare(microbatch, totals, sums)
        return self._metrics(sums)

    def _totals(self, microbatches: Sequence[Microbatch]) -> list[int]:
        """Tokens that are proposed at each depth, at least 1."""
        depths = range(len(self._shares))
        return [max(1, sum(len(_Rows.of(one, depth).proposing) for one in microbatches)) for depth in depths]

    def _compare(self, microbatch: Microbatch, totals: Sequence[int], sums: Tensor) -> Tensor:
        """This microbatch's part of the loss: the mean divergence at each depth times its share.

        Args:
            sums: [2, depth], where each depth's divergence and its share of agreement are added.
        """
        model, give_way = self._host.model, self._host.gate.give_way
        hidden = self._target.forward(microbatch.token_ids, microbatch.lengths, give_way)
        # A row's last neighbours may be of another document: nothing is learnt there.
        ids = [microbatch.token_ids.roll(-1 - depth) for depth in range(len(self._shares))]
        proposed = model.draft_packed(self._tensors, hidden, ids, microbatch.lengths, give_way=give_way)
        loss = torch.zeros((), device=hidden.device)
        for depth, (output, total) in enumerate(zip(proposed, totals, strict=True)):
            rows = _Rows.of(microbatch, depth)
            own = hidden.index_select(0, rows.deciding)
            found = model.divergence(
                output.index_select(0, rows.proposing), model, own, beta=0.0, temperature=1.0, give_way=give_way
            )
            part = divergence_loss(found.value, total)
            loss = loss + self._shares[depth] * part
            sums[0, depth] += part.detach()
            sums[1, depth] += found.agreed.sum() / total
        return loss

    def _metrics(self, sums: Tensor) -> dict[str, float]:
        losses, shares = sums.tolist()
        loss = sum(share * one for share, one in zip(self._shares, losses, strict=True))
        found = {"loss": loss, "acceptance": shares[0]}
        return found | {f"acceptance_{depth}": share for depth, share in enumerate(shares[1:], start=2)}


prepare = DraftRun.prepare
