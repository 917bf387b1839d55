"""Settings of an engine pod: engine, adapters, gRPC server and the limits of its trainer thread."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, PrivateAttr, field_validator, model_validator

from services.common.adapters.drafter_form import MOST_BLOCK, MOST_CHAINED, MTP_FORM, DrafterForm
from services.common.adapters.names import parse_adapter_ref
from services.common.errors import InvalidRequest
from services.common.settings import CommonSettings
from services.common.shutdown import CLOSE_SECONDS
from services.engine.models.weights.prompts import PromptProducts

_GIB = 1024**3
ADAPTER_SLOTS = 8
"""Adapter slots where neither the settings nor a small card say otherwise."""
MOST_DRAFTED_ON_GPU = 7
"""Most draft tokens of a request in a step on a GPU: beside a state the writes of as many and of the newest token can
wait (kernels.gpu.delta.waiting_writes)."""
TIERS = ("host", "disk", "store")
"""Fastest first, as in services/engine/kv_offload/messages.py."""


class EngineSettings(CommonSettings):
    """Environment: `TEMPER_` + the field name in capitals."""

    # Model and device.
    model: Path = Path("models/tiny")
    """Directory of a Qwen3.5 checkpoint: config.json, safetensors, tokenizer files."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on cuda, float32 on cpu."""
    quantization: Literal["auto", "none", "fp8", "int4"] = "auto"
    """Weights on the GPU, quantized while they load. fp8: e4m3 with a scale a row, needs compute capability 8.9. int4:
    groups of 128 weights, needs 8.0; the head is fp8 where the GPU has it. auto: fp8 for a checkpoint that is float8
    already, where the GPU has it; else none."""
    prefill_float8: str = "none"
    """Products of prompts to compute in float8, of a model whose weights are not quantized: all, or some of mlp,
    attention and linear_attention with commas between them, each with a range of layers if wished, as in mlp:0-15.
    Decodes go on in the model's dtype. A copy takes a byte a weight. Needs compute capability 8.9."""
    prefill_float8_rows: int = Field(0, ge=0)
    """Fewest prompt tokens of a step that are computed so; 0: 1024 on cuda, 64 on cpu."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Recurrent states of DeltaNet layers on the GPU; bfloat16 halves their memory and traffic and costs accuracy."""
    batch_invariant: bool = False
    """Greedy output of a request does not depend on other requests on the GPU; costs speed."""
    speculative: Literal["none", "mtp"] = "none"
    """mtp: the checkpoint's own mtp layer, or a drafter in its place, proposes draft tokens, and steps check several at
    once; a request's tokens do not change. On a GPU as many as pay by what was measured at the start, up to
    draft_tokens, and none in steps of many requests."""
    draft_tokens: int = Field(0, ge=0, le=MOST_BLOCK)
    """Most draft tokens of a request in a step, with speculative=mtp: up to 4, with a block drafter up to its block.
    0: 4 on a GPU, 1 on a CPU, where every step has as many; with a block drafter its block. A GPU checks at most 7."""
    drafter: str = ""
    """What drafts in the place of the checkpoint's mtp layer, such a layer or a block drafter: a directory with
    drafter.safetensors and drafter.json (with a / in it), or a drafter in the store, "name@n", or "name", whose current
    version is followed. Empty: the checkpoint's own."""
    cuda_graphs: int = Field(256, ge=0, le=256)
    """Largest decode batch that runs as a CUDA graph; 0: none."""
    programmatic_launch: bool = True
    """Start each GPU kernel while the one ahead ends, on compute capability 9.0 and higher."""
    device_limits: Literal["", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"] = ""
    """For tests: cut kernels up for the shared memory and the features of another, older GPU than the one they run on.
    Empty: for the GPU itself."""
    cache_dir: Path = Path("~/.cache/temper")
    """Compiled GPU kernels are kept here, so that only the first start compiles them, and what `temper tune` found."""
    kernel_archives: Path | None = None
    """Directory of archives of compiled kernels (`temper kernels pack`). A start whose cache_dir has no kernels yet
    unpacks the archive that fits its card and Triton; unset: it compiles."""
    tune: Literal["off", "kept", "start"] = "kept"
    """Configurations of GPU kernels. kept: those that `temper tune` found for this GPU, driver and model, else the
    table's. start: as kept, and a start that finds none searches first, for tune_seconds. off: the table's."""
    tune_seconds: float = Field(60.0, ge=5, le=600)
    """Longest search of `temper tune`, or of a start with tune=start."""
    torch_threads: int = Field(0, ge=0)
    """CPU threads of one operator; 0: all cores of this process."""

    # Memory.
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of one KV block."""
    num_blocks: int = Field(0, ge=0)
    """Number of KV blocks, scratch block 0 included; 0: as many as fit kv_cache_bytes."""
    kv_cache_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Budget of the paged KV cache, e.g. "2GiB"; 0: 256 MiB on cpu, what the plan leaves on cuda."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """auto: the model's dtype. fp8: half of that on the GPU, with a scale a token and head."""
    max_num_seqs: int = Field(0, ge=0, le=4096)
    """Sequences that run at once, one state slot each; 0: 64 on cpu, 256 on cuda (fewer where memory is short)."""
    state_snapshots: int = Field(0, ge=0)
    """State slots kept for the prefix cache; 0: 64 on cpu, 8 to 1,024 on cuda, a seventh of what the rest leaves."""
    snapshot_interval: int = Field(0, ge=0)
    """Tokens between two saved states of a long text in which no message ends; 0: as many tokens as have KV of twice
    the size of a state."""
    session_seconds: float = Field(600.0, ge=0)
    """Time after a request of a session for which its conversation stays pinned in the prefix cache."""
    max_sessions: int = Field(4096, ge=1)
    """Most sessions that are remembered; the least recently used one is forgotten first."""
    prefix_cache: bool = True
    """Reuse KV and states of equal prompt prefixes."""
    max_model_len: int = Field(0, ge=0)
    """Longest prompt + completion in tokens; 0: the checkpoint's context, at most what the KV cache holds."""
    token_budget: int = Field(0, ge=0)
    """Most tokens of one step: decodes first, the rest prefill chunks; 0: 512 on cpu; on cuda 8192, 4096 or 2048, the
    most whose activations take a twentieth of the memory."""
    mixed_prefill_tokens: int = Field(0, ge=0)
    """Most prefill tokens of a step that also decodes: bounds the time between tokens; 0: what the budget leaves on
    cpu, 3840 on cuda (4096 tokens a step beside 256 decodes, some 60 ms on an H200)."""
    device_memory: ByteSize = Field(ByteSize(0), ge=0)
    """Most bytes of the GPU that this engine takes, CUDA's context included, e.g. "22GB", for a card that others use,
    too; 0: what is free at its start."""
    memory_fraction: float = Field(0.9, gt=0, le=1)
    """Share of the device's memory that the memory plan may allocate."""

    # Tiers.
    tiers: str = "host"
    """Tiers of the prefix cache below the device's memory, separated by commas: host (memory of the machine), disk (a
    directory), store (the bucket, shared by all engines of the same model). Empty: none."""
    tier_host_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Memory of the machine for the tiers; 0: 256 MiB on cpu, an eighth of the memory, at most 32 GiB, on cuda. Without
    host in tiers it is only the way to the others."""
    tier_disk_dir: Path | None = None
    """Directory of the disk tier, one engine's own; none: prefix-cache in cache_dir."""
    tier_disk_bytes: ByteSize = Field(ByteSize(32 * _GIB), gt=0)
    """Most bytes of all files of the disk tier."""
    tier_store_bytes: ByteSize = Field(ByteSize(256 * _GIB), gt=0)
    """Most bytes of all objects of the model in the store tier, from all engines together."""
    tier_store_poll_seconds: float = Field(30.0, gt=0)
    """Interval at which the store is listed for entries of other engines."""
    tier_store_after_uses: int = Field(1, ge=0)
    """Hits after which an entry is saved to the store; 0: every entry is."""
    tier_close_seconds: float = Field(5.0, ge=0)
    """Longest time after SIGTERM in which sessions on device and host are still written to disk and store."""
    tier_load_seconds: float = Field(2.0, gt=0)
    """Longest wait of a request for a load from a tier; then it computes."""
    tier_load_share: float = Field(0.75, gt=0)
    """Longest wait for a load as a share of the computation that it saves. A load that is expected to take two thirds
    of that or more is not begun; one that takes much longer than expected is given up."""

    # Adapters.
    adapter_slots: int = Field(0, ge=0, le=256)
    """Adapter versions on the device at once, the base not counted, at least 2: a swap needs one slot beside the
    replaced version's. 0: 8; on cuda as many of them, at least 4, as take 3 % of the memory."""
    max_lora_rank: int = Field(32, ge=1, le=256)
    """Highest rank that fits an adapter slot."""
    adapter_poll_seconds: float = Field(2.0, gt=0)
    """Interval at which the pointers in the object store are read; an event on Redis triggers it earlier."""
    adapter_wait_seconds: float = Field(30.0, gt=0)
    """Longest wait of a request for its adapter to load or for a slot, if its deadline is not earlier."""

    # Requests.
    max_waiting: int = Field(256, ge=0)
    """Most requests that wait for their first step; more are refused as overloaded."""
    tpot_slo_ms: float = Field(50.0, gt=0)
    """Goal for the time per output token that training slices keep."""
    constraint_max_bytes: int = Field(256 * 1024, ge=1)
    """Longest source of a constraint (JSON schema, regular expression, grammar, choices); more is refused."""
    constraint_compile_seconds: float = Field(5.0, gt=0)
    """Longest wait of a request for its constraint to be compiled; a slower one is refused."""
    constraint_threads: int = Field(2, ge=1, le=64)
    """Most constraints that are compiled at once."""
    constraint_cache_entries: int = Field(256, ge=0)
    """Most compiled constraints that are cached."""
    constraint_cache_bytes: ByteSize = Field(ByteSize(8 * 1024 * 1024), ge=0)
    """Most bytes of the sources of cached constraints."""
    constraint_step_fuel: int = Field(200_000, ge=1)
    """Work of the lexer for the mask of one token, 14 units a microsecond; a request that needs more ends with an
    error."""
    constraint_max_states: int = Field(20_000, ge=1)
    """Most states of the lexer of one request, 1 to 2 kB each; a request that needs more ends with an error."""
    mask_threads: int = Field(0, ge=0, le=64)
    """CPU threads that make the masks of a step; 0: half of this process's cores, at most 8."""
    rollouts_max: int = Field(4096, ge=0)
    """Most finished completions that are kept for {completion_id, reward}."""
    rollouts_ttl_seconds: float = Field(3600.0, gt=0)

    # Training.
    trainer: bool = True
    """Run the trainer thread in this process."""
    max_train_tokens: int = Field(4096, ge=1)
    """Longest training example in tokens."""
    train_memory_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Memory that a training job may use; 0: a quarter of what weights, states and adapters leave."""
    train_float8: bool = False
    """Multiply with the frozen weights in float8 in forwards and backwards of training: faster, with the error in the
    gradients that factors rounded to e4m3 give, for two bytes more a weight. Needs compute capability 8.9."""
    teacher_model: Path | None = None
    """Directory of a second checkpoint with the same tokenizer, which opd jobs may learn from (teacher "checkpoint");
    it stays in memory beside the model."""
    teacher_quantization: Literal["auto", "none", "fp8", "int4"] = "auto"
    """Quantization of the second checkpoint, with the same values as quantization."""

    # Process.
    grpc_host: str = "127.0.0.1"
    grpc_port: int = Field(50051, ge=0, le=65535)
    """0: any free port (it is logged)."""
    engine_name: str = Field("", max_length=128)
    """Name of this engine in the metrics of gateways. Empty: the host's name, which a StatefulSet keeps over
    restarts."""
    kv_events: str = ""
    """Address at which changes of the prefix cache are published, in vLLM's format over ZeroMQ, for routers that send a
    prompt to where its prefix is: tcp://*:5557 to listen, or that of an indexer to connect to. They have the tokens of
    prompts, and there is no authentication. Empty: they are not published."""
    kv_events_replay: str = ""
    """Address at which subscribers ask for earlier ones: tcp://*:5558. Empty: nowhere."""
    kv_events_topic: str = ""
    """Topic of the events; empty: kv@, the engine's name, @ and the served model's name."""
    kv_events_kept: int = Field(10_000, ge=0)
    """Batches of events that are kept for subscribers that ask; a step that changes the cache makes one."""
    health_port: int = Field(0, ge=0, le=65535)
    """Port of grpc.health.v1 alone, in plaintext, from the start of the process on (the services' own port has it once
    they serve); 0: none. It is on grpc_host."""
    startup_wait_seconds: float = Field(0.0, ge=0)
    """Longest wait for Redis and the object store at start; 0: their absence is an error at once. A refused password
    always is."""
    watchdog_seconds: float = Field(300.0, ge=0)
    """Time after which a step, or the event loop, counts as hung and liveness is off; 0: never. It does not apply
    before the engine serves, so compiling and capturing at the start do not count."""
    max_message_bytes: int = Field(64 * 1024 * 1024, ge=1024 * 1024)
    """Longest gRPC message in either direction."""
    drain_seconds: float = Field(30.0, ge=0)
    """Time after SIGTERM in which running requests may still finish."""
    exit_with_parent: bool = False
    """End when the parent process is gone, so that no process is left behind."""

    _form: DrafterForm = PrivateAttr(MTP_FORM)

    @field_validator("tier_disk_dir", mode="before")
    @classmethod
    def _empty_directory_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("prefill_float8")
    @classmethod
    def _known_products(cls, value: str) -> str:
        return str(PromptProducts.parse(value))

    @field_validator("drafter")
    @classmethod
    def _named_drafter(cls, value: str) -> str:
        if value and "/" not in value:
            try:
                parse_adapter_ref(value)
            except InvalidRequest as error:
                raise ValueError(f"{error.message}; a directory has a / in it, as in ./{value}") from error
        return value

    @field_validator("tiers")
    @classmethod
    def _known_tiers(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        unknown = sorted(set(names) - set(TIERS))
        if unknown:
            raise ValueError(f"there is no tier {', '.join(unknown)}; the tiers are {', '.join(TIERS)}")
        return ",".join(name for name in TIERS if name in names)

    @model_validator(mode="after")
    def _consistent(self) -> EngineSettings:
        if 0 < self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence decodes one token a step"
            )
        if self.speculative != "none" and self.batch_invariant:
            raise ValueError(
                "batch_invariant and speculative contradict each other: what a row is computed with would depend on "
                "the draft tokens; set TEMPER_SPECULATIVE=none or TEMPER_BATCH_INVARIANT=false"
            )
        if self.prefill_float8 != "none" and self.batch_invariant:
            raise ValueError(
                "batch_invariant and prefill_float8 contradict each other: whether a prompt is computed in float8 "
                "depends on the rows of its step; set TEMPER_PREFILL_FLOAT8=none or TEMPER_BATCH_INVARIANT=false"
            )
        if self.drafter and self.speculative == "none":
            raise ValueError(
                f"drafter is {self.drafter!r}, and nothing drafts with speculative=none: set TEMPER_SPECULATIVE=mtp, "
                "or leave TEMPER_DRAFTER out"
            )
        if not self.drafter:
            _check_draft_tokens(self.draft_tokens, MTP_FORM)
        if self.kv_events and not self.prefix_cache:
            raise ValueError(
                "kv_events and prefix_cache=false contradict each other: the changes of the prefix cache are published"
            )
        if self.kv_events_replay and not self.kv_events:
            raise ValueError(
                "kv_events_replay is set, and kv_events is not: set TEMPER_KV_EVENTS to the address of the events"
            )
        if self.adapter_slots == 1:
            raise ValueError("adapter_slots must be 0 (automatic) or at least 2: a swap needs one slot more")
        if self.tune == "start" and self.batch_invariant:
            raise ValueError(
                "batch_invariant and tune=start contradict each other: rows of all batches are computed by one "
                "configuration, the table's; set TEMPER_TUNE=off or TEMPER_BATCH_INVARIANT=false"
            )
        if self.num_blocks == 1:
            raise ValueError("num_blocks must be 0 (automatic) or at least 2: block 0 is scratch")
        return self

    def resolved_device(self, cuda_available: bool) -> Literal["cpu", "cuda"]:
        """Device to use.

        Raises:
            ValueError: cuda is asked for and there is none.
        """
        if self.device == "auto":
            return "cuda" if cuda_available else "cpu"
        if self.device == "cuda" and not cuda_available:
            raise ValueError("TEMPER_DEVICE=cuda, but torch sees no GPU; use TEMPER_DEVICE=auto or cpu")
        return self.device

    @property
    def own_name(self) -> str:
        """Name of this engine."""
        return self.engine_name or socket.gethostname()

    def for_device(self, device: Literal["cpu", "cuda"]) -> EngineSettings:
        """Settings with every 0 that means "by device" filled in."""
        cuda = device == "cuda"
        block = min(self._form.block, MOST_DRAFTED_ON_GPU) if cuda else self._form.block
        sequences = self.max_num_seqs or (256 if cuda else 64)
        if self.token_budget and not self.max_num_seqs:
            sequences = min(sequences, self.token_budget)
        budget = self.token_budget or max(sequences, 8192 if cuda else 512)
        return self.model_copy(
            update={
                "max_num_seqs": sequences,
                "token_budget": budget,
                "adapter_slots": self.adapter_slots or ADAPTER_SLOTS,
                "draft_tokens": self.draft_tokens or block or (MOST_CHAINED if cuda else 1),
                "prefill_float8_rows": self.prefill_float8_rows or (1024 if cuda else 64),
                "mixed_prefill_tokens": self.mixed_prefill_tokens or (min(3840, budget) if cuda else budget),
            }
        )

    @property
    def drafter_directory(self) -> Path | None:
        """Directory of the drafter's files; None: it is in the store, or there is none."""
        return Path(self.drafter).expanduser() if "/" in self.drafter else None

    @property
    def followed_drafter(self) -> tuple[str, int | None] | None:
        """Name and version (None: the current one) of the drafter in the store; None: it is not there."""
        return parse_adapter_ref(self.drafter) if self.drafter and "/" not in self.drafter else None

    @property
    def drafter_form(self) -> DrafterForm:
        """Form of what drafts, with speculative=mtp."""
        return self._form

    def drafting_with(self, form: DrafterForm) -> EngineSettings:
        """Settings of an engine whose drafter is of this form. Raises InvalidRequest: draft_tokens is above its own."""
        try:
            _check_draft_tokens(self.draft_tokens, form)
        except ValueError as error:
            raise InvalidRequest(str(error), param="draft_tokens") from error
        made = self.model_copy()
        made._form = form
        return made

    @property
    def prompt_products(self) -> PromptProducts:
        """Products of prompts that are computed in float8."""
        return PromptProducts.parse(self.prefill_float8, max(1, self.prefill_float8_rows))

    @property
    def trains_in_float8(self) -> bool:
        """True if training multiplies with float8 copies of the weights."""
        return self.trainer and self.train_float8

    def termination_seconds(self, trainer_drain_seconds: float) -> float:
        """Longest time from SIGTERM to exit, which Kubernetes' terminationGracePeriodSeconds has to allow."""
        return max(self.drain_seconds, trainer_drain_seconds) + self.tier_close_seconds + CLOSE_SECONDS

    @property
    def kernel_cache_dir(self) -> Path:
        """Directory where Triton keeps compiled kernels.

        Raises:
            ValueError: cache_dir starts with ~ and this user has no home directory.
        """
        return self._cached("triton")

    @property
    def tuned_dir(self) -> Path:
        """Directory of tuned configurations.

        Raises:
            ValueError: as of kernel_cache_dir.
        """
        return self._cached("tuned")

    def _cached(self, name: str) -> Path:
        try:
            return self.cache_dir.expanduser().absolute() / name
        except RuntimeError as error:
            raise ValueError(f"TEMPER_CACHE_DIR={self.cache_dir}: {error}; set it to a full path") from error

    @property
    def tier_directory(self) -> Path:
        """Directory of the disk tier.

        Raises:
            ValueError: it starts with ~ and this user has no home directory.
        """
        directory = self.tier_disk_dir if self.tier_disk_dir is not None else self.cache_dir / "prefix-cache"
        try:
            return directory.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"TEMPER_TIER_DISK_DIR={directory}: {error}; set it to a full path") from error

    def tier_host_memory(self, device: Literal["cpu", "cuda"], memory: int) -> int:
        """Bytes of the machine's memory for the tiers, if this process may use ``memory`` bytes in all."""
        if self.tier_host_bytes:
            return int(self.tier_host_bytes)
        return min(memory // 8, 32 * _GIB) if device == "cuda" else _GIB // 4

    @property
    def kv_bytes_on_cpu(self) -> int:
        return int(self.kv_cache_bytes) or _GIB // 4


def _check_draft_tokens(number: int, form: DrafterForm) -> None:
    if number > form.most_tokens:
        raise ValueError(
            f"draft_tokens is {number}, and {form} proposes at most {form.most_tokens}: lower TEMPER_DRAFT_TOKENS, or "
            "set TEMPER_DRAFTER to a block drafter of as many tokens"
        )
