"""Guard rails: what about a job's settings and data is likely to go wrong, in words, and what to do about it.

They are looked at for every job that trains, and warn in its notes; a dry run says the same before. A setting that
cannot work at all is refused when the job is submitted. docs/decisions/dry-runs.md says where the limits come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.jobs.fields.lora import LoraSettings

USUAL_ALPHA, USUAL_RANK = 32.0, 16
MOST_SCALE = 2.0
"""Factor of an adapter's product (alpha / rank, or alpha / sqrt(rank)) up to which nothing is said."""
REFUSED_SCALE = 128.0
RATE_FACTOR = 10.0
"""A rate may be that many times the default, or that part of it."""
LEAST_GROUP = 4
BITS_A_PARAMETER = 2.0
FEW_EXAMPLES = 32
EPOCHS_FACTOR = 2
SATURATED = 0.94
WIDE = 0.5
"""Share of groups without spread from which on it is worth a word."""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """What a trainer knows of a prepared job. None: unknown, or without meaning for its kind.

    Raises:
        ValueError: a rate that is not positive.
    """

    rate: float
    usual_rate: float
    alpha: float | None = None
    """That of the adapter that is trained, the continued one's included."""
    scale: float | None = None
    """Factor of its product."""
    parameters: int | None = None
    data_bits: float | None = None
    examples: int | None = None
    epochs: float | None = None
    usual_epochs: float | None = None
    group_size: int | None = None
    """Completions of the smallest group."""
    groups: int = 0
    groups_skipped: int = 0
    saturation: float | None = None

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.usual_rate <= 0:
            raise ValueError(f"learning rates are positive: {self}")


def scale_of(lora: LoraSettings) -> float:
    """Factor of the product of a new adapter of this shape."""
    return lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)


def check_scale(lora: LoraSettings) -> None:
    """Refuses a shape whose every step is a jump.

    Raises:
        InvalidRequest: the factor is over REFUSED_SCALE.
    """
    if (scale := scale_of(lora)) > REFUSED_SCALE:
        root = "sqrt(rank)" if lora.use_rslora else "rank"
        raise InvalidRequest(
            f"lora.alpha {lora.alpha:g} over {root} of {lora.rank} multiplies the adapter by {scale:g}, and at most "
            f"{REFUSED_SCALE:g} is trained: a lower lora.alpha, or leave it out for {USUAL_ALPHA:g}",
            param="lora.alpha",
        )


def warnings(facts: TrainingFacts) -> list[str]:
    """What is likely to go wrong, each with the limit and a way out."""
    found = [
        _scale(facts),
        _rate(facts),
        _group_size(facts),
        _spread(facts),
        _capacity(facts),
        _epochs(facts),
        _saturation(facts),
    ]
    return [one for one in found if one is not None]


def _scale(facts: TrainingFacts) -> str | None:
    if facts.scale is None or facts.alpha is None or facts.scale <= MOST_SCALE or facts.alpha <= USUAL_ALPHA:
        return None
    return (
        f"lora.alpha {facts.alpha:g} multiplies the adapter by {facts.scale:g}, over {MOST_SCALE:g}: runs with such a "
        f"factor tend to diverge; leave lora.alpha out ({USUAL_ALPHA:g}), or lower it or learning_rate"
    )


def _rate(facts: TrainingFacts) -> str | None:
    ratio = facts.rate / facts.usual_rate
    if 1 / RATE_FACTOR <= ratio <= RATE_FACTOR * (1 + 1e-6):
        return None
    if ratio > 1:
        said = f"{ratio:.3g} times the default here: it may destroy what the model knows"
    else:
        said = f"a {1 / ratio:.3g}th of the default here: it may teach nothing"
    return f"learning_rate {facts.rate:.3g} is {said}; leave it out for {facts.usual_rate:.3g}"


def _group_size(facts: TrainingFacts) -> str | None:
    if facts.group_size is None or facts.group_size >= LEAST_GROUP:
        return None
    return (
        f"a group has {facts.group_size} completions, under {LEAST_GROUP}: a completion is compared with so few others "
        "that luck decides; sample more of each prompt"
    )


def _spread(facts: TrainingFacts) -> str | None:
    if not facts.groups or facts.groups_skipped < WIDE * facts.groups:
        return None
    return (
        f"{facts.groups_skipped} of {facts.groups} groups have equal rewards and teach nothing: choose prompts that "
        "are sometimes answered right, sample more completions, or score them more finely"
    )


def _capacity(facts: TrainingFacts) -> str | None:
    if facts.parameters is None or facts.data_bits is None:
        return None
    capacity = BITS_A_PARAMETER * facts.parameters
    if facts.data_bits <= capacity:
        return None
    return (
        f"the data has about {facts.data_bits:.2g} bits to learn and the adapter holds about {capacity:.2g} "
        f"({BITS_A_PARAMETER:g} a number): choose a higher lora.rank or more lora.target_modules"
    )


def _epochs(facts: TrainingFacts) -> str | None:
    examples, epochs, usual = facts.examples, facts.epochs, facts.usual_epochs
    if examples is None or epochs is None or usual is None:
        return None
    if examples > FEW_EXAMPLES or epochs <= EPOCHS_FACTOR * usual:
        return None
    return (
        f"{epochs:g} epochs over {examples} examples, where {usual:g} is the default: they are learnt by heart, and "
        "what else the model knows suffers; leave epochs out, or give more examples"
    )


def _saturation(facts: TrainingFacts) -> str | None:
    if facts.saturation is None or facts.saturation < SATURATED:
        return None
    return (
        f"the policy that the job starts from is right in {facts.saturation:.0%} already, from {SATURATED:.0%} on "
        "training tends to make it worse: choose what it gets wrong"
    )
