"""Teacher of a distillation job: the base model, a version of an adapter, or a second checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.divergence import Divergence
from services.common.adapters.composition import Composition, Published, versions_of
from services.common.errors import AdapterRejected, InvalidRequest, ModelNotFound
from services.common.jobs import CHECKPOINT, OpdJob
from services.common.jobs.kinds.opd import check_read
from services.engine.models.interface import CausalLM
from services.engine.models.lora.binding import BoundAdapter, bind_adapter, compose
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.training_arena import GraphMemory
from services.engine.models.training_forward import FrozenForward
from services.trainer.host.policy_host import PolicyHost
from services.trainer.memory.estimate import TeacherWork
from services.trainer.packing import Microbatch


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model that reads what the student said. Nothing of it is trained."""

    model: CausalLM
    lora: LoraParams | None
    memory: GraphMemory | None = None
    """Memory of its captured forwards."""
    most_tokens: int | None = None
    """Most tokens of a forward that ``memory`` has room for."""
    forward: FrozenForward = field(init=False)

    def __post_init__(self) -> None:
        forward = FrozenForward(self.model, self.lora, self.memory, most_tokens=self.most_tokens)
        object.__setattr__(self, "forward", forward)

    def within(self, memory: GraphMemory | None, most_tokens: int) -> Teacher:
        """The same on its model's device, with its forwards captured in this memory."""
        lora = None if self.lora is None else self.lora.on(self.model.device)
        return Teacher(self.model, lora, memory, most_tokens)

    @classmethod
    def of(cls, spec: OpdJob, host: PolicyHost) -> Teacher:
        """The teacher of a job. Its adapter is on the CPU until it is put `within` the job's memory.

        Raises:
            InvalidRequest: the pod has no second checkpoint, or there is no such version.
            AdapterRejected: the version does not bind to this base model.
            Unavailable: the object store does not answer.
        """
        if spec.teacher == CHECKPOINT:
            if host.teacher is None:
                raise InvalidRequest(NO_CHECKPOINT, param="teacher")
            return cls(host.teacher, None)
        return cls.of_version(spec.teacher_version, host, "teacher")

    @classmethod
    def of_version(cls, version: Published | None, host: PolicyHost, field: str) -> Teacher:
        """The served model with an adapter, which is on the CPU until it is put `within` the job's memory.

        Args:
            version: of the adapter, or a composition of several; None: without one.
            field: of the job, that names it.

        Raises:
            InvalidRequest: there is no such version.
            AdapterRejected: it does not bind to this base model, or has too many ranks.
            Unavailable: the object store does not answer.
        """
        if version is None:
            return cls(host.model, None)
        try:
            bound = _bound(version, host)
        except ModelNotFound as error:
            raise InvalidRequest(
                f"{field}: {error.message}: name a version that exists (GET /v1/adapters)", param=field
            ) from error
        except AdapterRejected as error:
            raise AdapterRejected(f"{field}: {error.message}", param=field) from error
        return cls(host.model, LoraParams.from_bound(bound))

    @property
    def work(self) -> TeacherWork:
        return TeacherWork(self.model.config, 0 if self.lora is None else self.lora.num_parameters())

    def says_the_same(self, student: CausalLM, lora: LoraParams) -> bool:
        """Whether the student with this adapter is the teacher already: what a step would learn from is rounding."""
        if self.model is not student:
            return False
        if self.lora is None:
            return not bool(lora.flat_b.any())
        same = self.lora.targets.keys() == lora.targets.keys()
        return same and all(
            one.scale == other.scale and torch.equal(one.a, other.a) and torch.equal(one.b, other.b)
            for one, other in zip(self.lora.targets.values(), lora.targets.values(), strict=True)
        )

    def check_vocabulary(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for an id that only the student's padded vocabulary has."""
        check_read(field, token_ids, self.model.config.vocab_size)

    @torch.no_grad()
    def hidden(self, microbatch: Microbatch, give_way: Callable[[], None]) -> Tensor:
        """[N, hidden]: final hidden states of the rows whose next token is trained. Inside the compute gate."""
        hidden = self.forward(microbatch.token_ids, microbatch.lengths, give_way)
        return hidden.index_select(0, microbatch.rows)

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float, give_way: Callable[[], None]) -> Tensor:
        """[N] float32, log-probabilities of the targets."""
        return self.model.token_logprobs(hidden, targets, temperature, give_way=give_way)

    def compare(
        self,
        student: CausalLM,
        hidden: Tensor,
        own: Tensor,
        *,
        beta: float,
        temperature: float,
        give_way: Callable[[], None],
    ) -> Divergence:
        """Divergence of the student, differentiable in its ``hidden``; ``own`` is what hidden() returned."""
        return student.divergence(hidden, self.model, own, beta=beta, temperature=temperature, give_way=give_way)


def _bound(version: Published, host: PolicyHost) -> BoundAdapter:
    config, max_rank = host.model.config, host.max_lora_rank
    found = [bind_adapter(host.adapter_files(one), config, max_rank=max_rank) for one in versions_of(version)]
    if not isinstance(version, Composition):
        return found[0]
    members = [(one.ref, bound, one.scale) for one, bound in zip(version.members, found, strict=True)]
    return compose(members, config, max_rank=max_rank)


NO_CHECKPOINT = (
    'teacher "checkpoint": this engine has no second model loaded; start it with TEMPER_TEACHER_MODEL set to the '
    'directory of a checkpoint with the same tokenizer, or choose "base" or a version "name@n" as the teacher'
)
