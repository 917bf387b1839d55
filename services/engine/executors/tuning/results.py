"""Results of tuning, kept as JSON in the cache directory: a file for each device and model, good for the software that
it was measured with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from kernels.gpu.attention.decode import DecodeConfig
from kernels.gpu.configs import Product
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from services.engine.executors.tuning.choice import Config, Subject
from services.engine.executors.tuning.tuner import Band

log = structlog.get_logger(__name__)

FORMAT = 1
Facts: TypeAlias = Mapping[str, Any]
"""JSON values by name."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of what was measured."""

    place: Facts
    """The device, and the shapes and number formats of the model: each has a file of its own."""
    software: Facts
    """Versions that decide whether what is in the file still holds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one search."""

    bands: Sequence[Band]
    seconds: float
    trials: int
    """Candidates that were measured."""


def path_of(directory: Path, identity: Identity) -> Path:
    """File that results are kept in."""
    digest = hashlib.sha256(json.dumps(identity.place, sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"tuned-{digest}.json"


def load(directory: Path, identity: Identity) -> Outcome | None:
    """Results that hold for this identity; None: there are none. A file that does not hold is left alone, and one line
    says why."""
    path = path_of(directory, identity)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("tuned configurations cannot be read", file=str(path), error=str(error))
        return None
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
        if data["place"] != _plain(identity.place):
            raise ValueError("of another device or model")
        before, now = data["software"], _plain(identity.software)
        if before != now:
            changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            log.info("tuned configurations are of other software", file=str(path), changed=changed)
            return None
        bands = [_band(each) for each in data["bands"]]
        return Outcome(bands, float(data["seconds"]), int(data["trials"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        log.warning("tuned configurations are ignored: the file is damaged; delete it", file=str(path), error=reason)
        return None


def save(directory: Path, identity: Identity, outcome: Outcome) -> Path:
    """Keeps results, in place of earlier ones.

    Raises:
        OSError: the directory cannot be written.
    """
    path = path_of(directory, identity)
    directory.mkdir(parents=True, exist_ok=True)
    data = {
        "format": FORMAT,
        "place": identity.place,
        "software": identity.software,
        "seconds": round(outcome.seconds, 1),
        "trials": outcome.trials,
        "bands": [
            {
                "rows": band.rows,
                "seconds": band.seconds,
                "gain": band.gain,
                "choice": [_entry(subject, config) for subject, config in band.choice.items()],
            }
            for band in outcome.bands
        ],
    }
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with scratch.open("w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _plain(facts: Facts) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(facts))


def _entry(subject: Subject, config: Config) -> dict[str, Any]:
    of = list(subject) if isinstance(subject, Product) else subject
    return {"of": of, "config": None if config is None else asdict(config)}


def _band(data: Mapping[str, Any]) -> Band:
    choice: dict[Subject, Config] = {}
    for entry in data["choice"]:
        of, config = entry["of"], entry["config"]
        if of == "attention":
            choice["attention"] = DecodeConfig(**config)
        else:
            kind, outputs, inputs = of
            if kind not in ("none", "fp8", "int4"):
                raise ValueError(f"weights of kind {kind!r}")
            choice[Product(kind, int(outputs), int(inputs))] = None if config is None else SkinnyConfig(**config)
    if int(data["rows"]) < 1:
        raise ValueError(f"a step of {data['rows']} rows")
    return Band(int(data["rows"]), choice, float(data["seconds"]), float(data["gain"]))
