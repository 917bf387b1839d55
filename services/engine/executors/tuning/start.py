"""Tuned configurations at a start: those that are kept, or a search before the first request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.engine.executors.cuda.runner import CudaRunner
from services.engine.executors.tuning.results import Identity, Outcome, load, save
from services.engine.executors.tuning.search import identity_of, search, use
from services.engine.models.device_batch import DeviceCache
from services.engine.models.interface import CausalLM
from services.engine.models.lora.slots import LoraSlots

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tuning of a runner that has not captured its steps yet.

    Args:
        directory: where results are kept.
        seconds: most time of a search.
        temper: version of this software.
    """

    runner: CudaRunner
    model: CausalLM
    cache: DeviceCache
    lora: LoraSlots
    directory: Path
    seconds: float
    max_model_len: int
    pdl: bool
    temper: str

    def use_kept(self) -> bool:
        """Has the runner use what is kept for this device and model; False: nothing is."""
        outcome = load(self.directory, self._identity())
        if outcome is None:
            return False
        use(self.model.kernel_configs(), outcome.bands)
        log.info("tuned configurations", gains=gains(outcome))
        return True

    def search(self, told: Callable[[float, str], None] = lambda _seconds, _text: None) -> tuple[Outcome, Path | None]:
        """Searches, keeps what is found and has the runner use it.

        Args:
            told: told of the progress: the seconds used, and what was found, if anything.

        Returns:
            What was found, and the file; None: it could not be written.
        """
        log.info("tuning the kernels to this GPU", most_seconds=self.seconds)
        outcome = search(
            self.runner,
            self.model,
            self.cache,
            self.lora,
            max_model_len=self.max_model_len,
            seconds=self.seconds,
            told=told,
        )
        use(self.model.kernel_configs(), outcome.bands)
        path: Path | None = None
        try:
            path = save(self.directory, self._identity(), outcome)
        except OSError as error:
            log.warning("tuned configurations cannot be kept", directory=str(self.directory), error=str(error))
        log.info("kernels tuned", seconds=round(outcome.seconds, 1), trials=outcome.trials, gains=gains(outcome))
        return outcome, path

    def _identity(self) -> Identity:
        return identity_of(self.model, self.cache, pdl=self.pdl, temper=self.temper)


def gains(outcome: Outcome) -> dict[int, str]:
    """Part of the step that was gained, by the number of rows."""
    return {band.rows: f"{band.gain:.1%}" for band in outcome.bands if band.choice}
