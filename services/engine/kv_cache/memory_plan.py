"""Memory plan: the device's bytes divided among weights, caches and training, once at start. No torch here.

A plan that does not fit is refused, with its numbers, before anything is allocated. So no request or job runs out of
memory half-way.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import DoesNotFit

_TRAINING_SHARE = 0.25
"""Default share of training in what weights, states, adapters and workspace leave; KV gets the rest."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of the model's parts, in bytes."""

    weights: int
    block: int
    """Size of one KV block in all full-attention layers."""
    slot: int
    """Recurrent and convolution state of one sequence in all DeltaNet layers."""
    adapter_slot: int
    """Size of one adapter slot of the highest rank."""
    workspace: int
    """Activations and logits of the largest step, allocator slack."""
    sampler: int = 0
    """Tables of the sampler that stay on the device."""
    graphs: int = 0
    """Memory that captured CUDA graphs keep."""
    teacher: int = 0
    """Weights of the second model that jobs distil from."""
    copies: int = 0
    """Float8 copies of weights, for prompts and for training."""

    def __post_init__(self) -> None:
        for name in ("weights", "block", "slot", "adapter_slot", "workspace", "sampler", "graphs", "teacher", "copies"):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name == "block"):
                raise ValueError(f"{name} must be a number of bytes, got {value}")

    @property
    def fixed(self) -> int:
        """Bytes that are taken whatever the number of sequences, adapters and blocks."""
        return self.weights + self.copies + self.workspace + self.sampler + self.graphs + self.teacher


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of ``budget`` bytes."""

    budget: int
    weights: int
    workspace: int
    states: int
    adapters: int
    kv: int
    training: int
    num_blocks: int
    """Number of KV blocks, scratch block 0 included."""
    block_size: int
    sampler: int = 0
    graphs: int = 0
    teacher: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def unclaimed(self) -> int:
        """Bytes that weights, adapters and workspace leave to states, KV and training."""
        return self.budget - self.total + self.states + self.kv + self.training

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence whose KV fits when it runs alone."""
        return (self.num_blocks - 1) * self.block_size

    def model_len(self, context: int, wanted: int = 0) -> int:
        """Longest prompt and output together that is accepted, in tokens.

        Args:
            context: context length of the checkpoint, tokens.
            wanted: length that the settings ask for; 0: as much as context and KV allow.

        Raises:
            DoesNotFit: ``wanted`` is more than that.
        """
        # The last output token is never fed back and needs no KV.
        possible = min(context, self.capacity_tokens + 1)
        if wanted > possible:
            limit = "the checkpoint's context" if wanted > context else f"{self.num_blocks - 1} KV blocks"
            raise DoesNotFit(
                f"max_model_len {wanted} is over {limit}, which allows {possible} tokens: lower it or give KV "
                f"more memory\n{self.table()}",
                param="max_model_len",
            )
        return wanted or possible

    def table(self) -> str:
        """Table with one line for each purpose, for logs and error messages."""
        rows = [*self.parts().items(), ("total", self.total), ("budget", self.budget)]
        return "\n".join(f"{name:<10}{format_bytes(value):>12}" for name, value in rows)

    def parts(self) -> dict[str, int]:
        """Bytes of each purpose."""
        return {
            "weights": self.weights,
            "copies": self.copies,
            "teacher": self.teacher,
            "workspace": self.workspace,
            "sampler": self.sampler,
            "graphs": self.graphs,
            "states": self.states,
            "adapters": self.adapters,
            "kv": self.kv,
            "training": self.training,
        }

    def shares(self) -> dict[str, int]:
        """Bytes of each purpose, and of what is "free": what the plan leaves of the budget."""
        return {**self.parts(), "free": self.budget - self.total}


def plan_memory(
    budget: int,
    footprint: Footprint,
    *,
    block_size: int,
    num_slots: int,
    adapter_slots: int,
    num_blocks: int = 0,
    kv_bytes: int = 0,
    training_bytes: int | None = None,
    training_floor: int = 0,
    useful_blocks: int | None = None,
) -> MemoryPlan:
    """Divides the device's memory.

    Args:
        budget: bytes that may be allocated in all.
        num_slots: state slots, scratch and snapshots included.
        adapter_slots: LoRA slots, the base's empty one included.
        num_blocks: KV blocks, scratch included; 0: as many as fit ``kv_bytes``.
        kv_bytes: memory for KV; 0: what is left over.
        training_bytes: memory for training; None: a quarter of what is left over.
        training_floor: least memory for training, even if it is more than that quarter, but at most half.
        useful_blocks: most KV blocks where their number is chosen here.

    Raises:
        DoesNotFit: the parts are more than the budget, or no KV block fits.
    """
    states = num_slots * footprint.slot
    adapters = adapter_slots * footprint.adapter_slot
    left = budget - footprint.fixed - states - adapters
    training = training_bytes
    if training is None:
        training = max(0, int(left * _TRAINING_SHARE), min(training_floor, left // 2))
    if num_blocks == 0:
        num_blocks = max(0, kv_bytes or left - training) // footprint.block
        if useful_blocks is not None:
            num_blocks = min(num_blocks, useful_blocks)
    plan = MemoryPlan(
        budget=budget,
        weights=footprint.weights,
        workspace=footprint.workspace,
        states=states,
        adapters=adapters,
        kv=num_blocks * footprint.block,
        training=training,
        num_blocks=num_blocks,
        block_size=block_size,
        sampler=footprint.sampler,
        graphs=footprint.graphs,
        teacher=footprint.teacher,
        copies=footprint.copies,
    )
    if plan.total > budget:
        raise DoesNotFit(
            f"the device lacks {format_bytes(plan.total - budget)}: {format_bytes(plan.total)} are needed, of "
            f"{format_bytes(budget)}; lower max_num_seqs, state_snapshots, adapter_slots, kv_cache_bytes or "
            f"train_memory_bytes\n{plan.table()}"
        )
    if num_blocks < 2:
        raise DoesNotFit(
            f"no KV block of {format_bytes(footprint.block)} is left: lower max_num_seqs, state_snapshots, "
            f"adapter_slots or train_memory_bytes, or raise kv_cache_bytes\n{plan.table()}"
        )
    return plan


def format_bytes(count: int) -> str:
    """Size in a readable unit: "1.50 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
