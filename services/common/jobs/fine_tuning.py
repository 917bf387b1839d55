"""Request of a fine-tuning job of OpenAI's API, as the record of the training job that was made of it keeps it."""

from __future__ import annotations

from typing import Any

from services.common.validation.strict_models import StrictModel


class FineTuning(StrictModel):
    """Request of a fine-tuning job, without its data."""

    model: str
    """Name of the model that was to be tuned, as it was given."""
    training_file: str
    validation_file: str | None = None
    seed: int
    method: dict[str, Any]
    """Method with its hyperparameters, as OpenAI's API shows it."""
