"""Parts of the engine that its gRPC services use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from services.common.pb import engine_pb2 as pb
from services.common.shutdown import SleepLevel
from services.common.telemetry.recent_logs import RecentLogs
from services.common.text.tokenizer import TextCodec
from services.engine.adapters.manager import AdapterManager
from services.engine.constraints.compiler import ConstraintCompiler
from services.engine.loop.loop import EngineLoop
from services.engine.models.lora.binding import BoundAdapter
from services.engine.observability.usage import UsageTotals
from services.engine.server.recent_prompts import RecentPrompts
from services.engine.server.stream_load import StreamLoads


@dataclass(frozen=True, slots=True)
class Serving:
    """Parts of the engine that the services use."""

    loop: EngineLoop
    adapters: AdapterManager
    bind: Callable[[Mapping[str, bytes]], BoundAdapter]
    """Reads an adapter's files strictly; raises AdapterRejected."""
    read_drafter: Callable[[Mapping[str, bytes]], Mapping[str, Tensor]]
    """The same of a drafter's."""
    constraints: ConstraintCompiler
    codec: TextCodec
    model: pb.Model
    max_waiting: int
    job_id: Callable[[], str]
    """Returns the id of the running training job, empty when idle."""
    sessions: Callable[[], tuple[str, int, int]] = lambda: ("", 0, 0)
    """Returns this process's instance id, and the number of open training sessions and of possible ones."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the memory plan by purpose."""
    usage: UsageTotals = field(default_factory=UsageTotals)
    recent: RecentLogs = field(default_factory=RecentLogs)
    """Last lines of this process's log."""
    block_size: int = 0
    """Tokens of a KV block; 0: it is not told."""
    sleep: Callable[[SleepLevel], None] | None = None
    """Begins to put the process to sleep; raises InvalidRequest at a level that it does not have. None: it cannot
    be."""
    prompts: RecentPrompts = field(default_factory=RecentPrompts)
    loads: StreamLoads = field(default_factory=StreamLoads)
