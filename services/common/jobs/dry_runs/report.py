"""Report of a dry run: everything about a job that can be known before it trains."""

from __future__ import annotations

from pydantic import Field

from services.common.validation.strict_models import StrictModel


class DataCounts(StrictModel):
    """Data of a job, as it is trained on."""

    unit: str
    """Unit that is counted: "example", "group" (grpo) or "prompt" (a job that samples for itself)."""
    given: int
    """Units that the job has, without those held out."""
    kept: int
    """Units that something is learnt from. Of a job that samples: of those that were tried."""
    dropped: int = 0
    truncated: int = 0
    held_out: int = 0
    documents: int = 0
    """Token sequences: completions, or turns of a conversation that the template rewrites."""
    tokens: int = 0
    """Tokens of one pass over them."""
    trained_tokens: int = 0
    """Tokens among these that the loss is on."""
    longest: int = 0
    """Tokens of the longest document."""


class Span(StrictModel):
    """Piece of a text that is trained on as a whole, or is context as a whole."""

    text: str
    trained: bool


class ShownDocument(StrictModel):
    """A document as text, cut into what is trained and what is context."""

    source: int
    """Index of its example or rollout."""
    tokens: int
    trained_tokens: int
    spans: list[Span]
    cut: bool = False
    """Only its beginning and end are shown."""


class GroupRewards(StrictModel):
    """Rewards of the completions of one prompt."""

    completions: int
    mean: float
    std: float
    """Over the group; 0: nothing is learnt from it."""
    least: float
    most: float


class RewardSpread(StrictModel):
    """Rewards of all rollouts that the job has, or that were tried."""

    mean: float
    std: float
    groups: int
    groups_skipped: int
    """Groups whose rewards are all equal."""
    by_group: list[GroupRewards]
    """The first groups."""


class ExpectedTime(StrictModel):
    """Duration of the job."""

    seconds: float
    steps: int
    basis: str
    """What it was concluded from."""


class ExpectedMemory(StrictModel):
    """Bytes of the job beside the frozen weights, by the plan that a real job is refused by."""

    needed: int
    available: int
    adapter: int
    activations: int
    logits: int
    teacher: int
    basis: str


class RankCapacity(StrictModel):
    """Capacity of the adapter against what there is to learn."""

    parameters: int
    capacity_bits: float
    data_bits: float
    basis: str


class Saturation(StrictModel):
    """Share of the data that the policy which the job starts from gets right already."""

    share: float
    of: str
    """What it is a share of."""
    measured: int
    """How many of those were looked at."""


class DryRunReport(StrictModel):
    """What a dry run found out."""

    counts: DataCounts
    samples: list[ShownDocument]
    rewards: RewardSpread | None = None
    """Of jobs that learn from rewards."""
    time: ExpectedTime
    memory: ExpectedMemory
    capacity: RankCapacity | None = None
    """Of jobs that train an adapter."""
    saturation: Saturation | None = None
    """null: the method has no right answers to compare with."""
    warnings: list[str] = Field(default_factory=list)
    """What the guard rails say; also among the job's notes."""
