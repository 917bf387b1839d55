"""Resources of Tinker's API, and calls of a run: each becomes one of its training session, under the same number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, TemperError
from services.common.jobs.training_sessions.calls import Call, ForwardBackward, Refused, check_tokens
from services.common.storage.object_store import ObjectStore
from services.gateway.api.base.routing import provided
from services.gateway.api.training.tinker.names import RequestId
from services.gateway.api.training.tinker.records import RunRecord, TinkerRecords
from services.gateway.api.training.tinker.samples import Samples
from services.gateway.api.training.validation import TrainingServices
from services.gateway.core.admission import Lifecycle
from services.gateway.core.file_store import StoreThreads
from services.gateway.engines.calls.training_sessions import TrainingSessionRouter
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings

_MOST_REASON = 4000


@dataclass(frozen=True, slots=True)
class TinkerServices:
    """Resources of Tinker's API."""

    settings: GatewaySettings
    engines: EnginePool
    sessions: TrainingSessionRouter
    registry: AdapterRegistry
    records: TinkerRecords
    samples: Samples
    threads: StoreThreads
    lifecycle: Lifecycle
    opening: dict[str, Any] = field(default_factory=dict)
    """Tasks that open runs, by the run's id: a request that is sent again waits for the first one."""

    @classmethod
    def of(cls, training: TrainingServices, sessions: TrainingSessionRouter, store: ObjectStore) -> TinkerServices:
        """Services with records in ``store``."""
        settings, threads = training.settings, training.threads
        return cls(
            settings,
            training.engines,
            sessions,
            training.registry,
            TinkerRecords(store, threads),
            Samples(settings),
            threads,
            training.lifecycle,
        )

    @property
    def base_model(self) -> str:
        """Name under which clients know the model."""
        return self.settings.tinker_base_model or self.settings.served_model_name

    def check_base_model(self, name: str) -> None:
        """Raises InvalidRequest if another model is asked for."""
        if name not in (self.base_model, self.settings.served_model_name):
            raise InvalidRequest(
                f"base_model {name[:80]!r} is not served here: this server has {self.base_model!r} "
                "(TEMPER_TINKER_BASE_MODEL is the name that clients may know it by)",
                param="base_model",
            )


Tinker = Annotated[TinkerServices, provided(TinkerServices)]


async def submit(tinker: TinkerServices, run: RunRecord, call: Call, about: dict[str, Any]) -> RequestId:
    """Puts a call into the line of a run's training session. One that the engine refuses is put there all the same, and
    fails when its turn comes: the numbers behind it wait for it.

    Args:
        about: parts of the answer that the engine does not know.

    Raises:
        NotFound, Gone, Conflict, Overloaded, Unavailable: as TrainingSessionRouter.submit says.
    """
    info = tinker.engines.served.info
    try:
        check_tokens(call, vocab_size=info.vocab_size, max_train_tokens=info.max_train_tokens, max_call_tokens=0)
        future = await tinker.sessions.submit(run.training_session, call)
    except InvalidRequest as error:
        refused = refusal(call.seq, error, gradient=isinstance(call, ForwardBackward))
        future = await tinker.sessions.submit(run.training_session, refused)
    return RequestId("call", {**about, "future": future.id, "run": run.id})


def refusal(seq: int, error: TemperError, *, gradient: bool = False) -> Refused:
    """The call in the place of one that is refused."""
    param = None if error.param is None else error.param[:256]
    return Refused(seq=seq, reason=error.message[:_MOST_REASON], param=param, gradient=gradient)
