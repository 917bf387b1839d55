"""Machine that a pipeline computes on: its device, the memory that stages may take, an engine for evaluations, and the
turns that it takes with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from services.common.errors import DoesNotFit
from services.engine.models.config import ModelConfig
from services.engine.models.interface import CausalLM
from services.engine.models.registry import read_config
from services.engine.models.weights.shards import Progress
from services.forge.recovery.plan import LoadedTeacher
from services.trainer.evaluation.run import Retry
from services.trainer.host.policy_host import ComputeGate, PolicyHost
from services.trainer.memory.estimate import mib

T = TypeVar("T")


class OpenEngine(Protocol):
    """Starts an engine of a checkpoint directory, for as long as the block runs."""

    def __call__(self, directory: Path, /) -> AbstractContextManager[PolicyHost]: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What a pipeline has of its machine."""

    device: str
    """"cpu" or "cuda"."""
    memory_bytes: int
    """Bytes of the device that stages may use."""
    open_engine: OpenEngine
    engine_bytes: Callable[[ModelConfig], int]
    """Bytes that an engine of a model takes of the device."""
    serves: Path | None = None
    """Checkpoint of an engine beside it, which evaluates that itself; None: there is none."""
    teacher: LoadedTeacher | None = None
    """The model that a run begins with, if an engine beside it has it loaded; None: importance and distillation load
    it."""
    gate: ComputeGate | None = None
    """Gate of an engine that serves from the device; None: nobody does."""
    reserve: Callable[[int], object] = int
    """Takes so many bytes of the device for the next stage, of others that share it; raises what makes it wait. They
    are the stage's until it ends, also while others have their turns."""
    interrupt: Callable[[], None] = lambda: None
    """Called several times a second; may raise to end the run, which goes on later."""
    retry: Retry = lambda operation: operation()
    """Repeats what needs a store that may be away."""

    def is_served(self, directory: Path) -> bool:
        """Whether an engine beside it has this checkpoint."""
        return self.serves is not None and directory.resolve() == self.serves.resolve()

    def loaded(self, digest: str) -> CausalLM | None:
        """The checkpoint of this digest, if an engine beside it has it loaded."""
        return self.teacher.model if self.teacher is not None and self.teacher.digest == digest else None

    def evaluation_bytes(self, directory: Path) -> int:
        """Bytes that the evaluation of a checkpoint takes."""
        return 0 if self.is_served(directory) else self.engine_bytes(read_config(directory))

    def telling(self, progress: Progress) -> Progress:
        """Progress where a run may be ended, once it is told."""

        def tell(stage: str, done: int, total: int) -> None:
            progress(stage, done, total)
            self.interrupt()

        return tell

    def take(self, stage: str, nbytes: int, way_out: str) -> None:
        """Reserves memory before a stage allocates it.

        Args:
            way_out: what the user can change.

        Raises:
            DoesNotFit: there is less; the message has the numbers.
        """
        if nbytes > self.memory_bytes:
            raise DoesNotFit(
                f"{stage} needs {mib(nbytes)} of memory, and there are {mib(self.memory_bytes)}: {way_out}",
                param=stage,
            )
        self.retry(lambda: self.reserve(nbytes))


class Turn:
    """Turn of a stage on the device: held while it computes, left while it reads, writes and tells. A context manager.

    Args:
        gate: None: there is nobody to take turns with.
    """

    def __init__(self, machine: Machine) -> None:
        self._gate = machine.gate
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def give_way(self) -> None:
        """Called between layers."""
        if self._gate is not None:
            self._gate.give_way()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Others have the device inside."""
        self._held.close()
        yield
        self._take()

    def telling(self, progress: Progress) -> Progress:
        """Progress that is told outside of the turn."""

        def tell(stage: str, done: int, total: int) -> None:
            with self.left():
                progress(stage, done, total)

        return tell

    def _take(self) -> None:
        if self._gate is not None:
            self._held.enter_context(self._gate.training())
