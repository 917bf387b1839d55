"""Binding of PEFT files: tensors matched to linear layers, each tensor exactly once, in the right shape, or a
refusal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.common.errors import AdapterRejected
from services.engine.models.config import ModelConfig
from services.engine.models.lora.peft_config import CONFIG_FILE as CONFIG_FILE
from services.engine.models.lora.peft_config import WEIGHTS_FILE as WEIGHTS_FILE
from services.engine.models.lora.peft_config import AdapterSettings, parse_config
from services.engine.models.lora.targets import target_shapes
from services.engine.models.weights.tensor_file import header_end, read_tensors

PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT writes before a module's path in the class it wraps; ModelConfig.module_prefix is the next part."""
_KEY = re.compile(
    r"base_model\.model\.(model\.language_model\.|model\.)(layers\.\d{1,5}\.[\w.]{1,200})\.lora_(A|B)\.weight", re.ASCII
)
_FROZEN = re.compile(r"\.mlp\.(experts|gate|shared_expert_gate)\.")
"""Parts of a mixture of experts without an adapter."""
ADAPTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYOUTS = 16
"""Remembered at most, of 100 KB each for an adapter on all layers of a 4B model."""
_HEADER_BYTES = 16 * 2**20
"""Size limit of the header of a layout that is remembered."""


@dataclass(frozen=True, slots=True)
class BoundTarget:
    """The adapter of one linear layer: y += scale · B (A x)."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank]."""
    alpha: float
    scale: float
    keys: tuple[str, str] = ("lora_A", "lora_B")
    """Names of a and b in the file."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """An adapter that fits the model."""

    targets: Mapping[str, BoundTarget]
    """Bound layers by path in the model, e.g. "layers.3.self_attn.q_proj"."""
    rank: int
    """The configured rank; a rank_pattern may give single layers another."""
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]
    """Sorted last names of the adapted linear layers; full paths where only some layers have the module adapted."""
    module_prefix: str
    """ModelConfig.module_prefix of the base, whichever form the files had."""
    layout: object | None = None
    """Layout of the file: one object for all adapters of AdapterBinder whose files differ in nothing but numbers."""
    data: bytes = b""
    """The file that the tensors are views of, if there is a layout."""

    @property
    def max_rank(self) -> int:
        return max(target.rank for target in self.targets.values())

    def check_finite(self) -> None:
        """Raises AdapterRejected if a value is not finite; names the tensor."""
        for target in self.targets.values():
            for key, tensor in zip(target.keys, (target.a, target.b), strict=True):
                if not _finite(tensor):
                    raise AdapterRejected(f"tensor {key} has values that are not finite")


def lora_scale(alpha: float, rank: int, use_rslora: bool) -> float:
    """α / r, or α / √r (rank-stabilised, arXiv 2312.03732)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def bind_adapter(
    files: Mapping[str, bytes], config: ModelConfig, *, max_rank: int, check_values: bool = True
) -> BoundAdapter:
    """Checks PEFT files against the model and takes them apart.

    Args:
        files: adapter_model.safetensors and adapter_config.json by name.
        check_values: False: values may be not finite; for LoraSlots.load(), which refuses those too.

    Raises:
        AdapterRejected: anything missing, extra, misshaped, not finite or not plain LoRA; names the tensor or field.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise AdapterRejected(f"the adapter has no {name}")
    settings = AdapterSettings(parse_config(files[CONFIG_FILE]))
    try:
        tensors = read_tensors(files[WEIGHTS_FILE])
    except (ValueError, RecursionError) as error:
        raise AdapterRejected(f"{WEIGHTS_FILE} is corrupt: {error}") from error
    prefix = prefix_of(tensors)
    expected = {path: shape for path, shape in target_shapes(config).items() if settings.targets(prefix + path)}
    if not expected:
        raise AdapterRejected(
            f"{CONFIG_FILE}: target_modules matches no linear layer of this model: by the keys of {WEIGHTS_FILE} their "
            f"names begin with {prefix}layers, and it is read against those, as in PEFT"
        )
    halves = sort_tensors(tensors, expected.keys())
    targets: dict[str, BoundTarget] = {}
    for path, (out_features, in_features) in expected.items():
        rank, alpha = settings.rank(prefix + path), settings.alpha(prefix + path)
        if rank > max_rank:
            raise AdapterRejected(
                f"{path} has rank {rank}, over this engine's limit of {max_rank} (TEMPER_MAX_LORA_RANK)"
            )
        key = f"{PEFT_PREFIX}{prefix}{path}"
        a_key, a = _checked(halves, path, "A", (rank, in_features), f"{key}.lora_A.weight")
        b_key, b = _checked(halves, path, "B", (out_features, rank), f"{key}.lora_B.weight")
        targets[path] = BoundTarget(a, b, alpha, lora_scale(alpha, rank, settings.use_rslora), (a_key, b_key))
    bound = BoundAdapter(
        targets=targets,
        rank=settings.r,
        alpha=settings.lora_alpha,
        use_rslora=settings.use_rslora,
        target_modules=name_targets(targets, config),
        module_prefix=config.module_prefix,
    )
    if check_values:
        bound.check_finite()
    return bound


class AdapterBinder:
    """bind_adapter() of one model for LoraSlots.load(), which looks at the values. Used by one thread at a time.

    What it checks is decided by adapter_config.json and the header of the weights. Later versions of an adapter repeat
    both: taking them apart again would be 10 ms of Python, in which the thread that serves waits for the interpreter.
    """

    def __init__(self, config: ModelConfig, *, max_rank: int) -> None:
        self._config, self._max_rank = config, max_rank
        self._known: dict[tuple[bytes, bytes, int], BoundAdapter] = {}
        """Configuration, header and bytes of the weights' file → what was bound, without its tensors."""

    def bind(self, files: Mapping[str, bytes]) -> BoundAdapter:
        """Same result as bind_adapter(..., check_values=False); the tensors are made when somebody asks for them.

        Raises:
            AdapterRejected: as bind_adapter().
        """

        def bound() -> BoundAdapter:
            return bind_adapter(files, self._config, max_rank=self._max_rank, check_values=False)

        weights = files.get(WEIGHTS_FILE, b"")
        end = header_end(weights)
        if CONFIG_FILE not in files or end > min(len(weights), _HEADER_BYTES):
            return bound()
        key = (files[CONFIG_FILE], weights[:end], len(weights))
        known = self._known.get(key)
        if known is not None:
            return replace(known, targets=_Later(lambda: bound().targets), data=weights)
        first = replace(bound(), layout=object(), data=weights)
        if len(self._known) >= _LAYOUTS:
            self._known.clear()
        self._known[key] = replace(first, targets={}, data=b"")
        return first

    def compose(self, members: Sequence[tuple[str, BoundAdapter, float]]) -> BoundAdapter:
        """See compose()."""
        return compose(members, self._config, max_rank=self._max_rank)


def compose(members: Sequence[tuple[str, BoundAdapter, float]], config: ModelConfig, *, max_rank: int) -> BoundAdapter:
    """Adapter that adds what each member adds, times its scale: at each layer the ranks of the members that have it
    lie side by side, A under A and B beside B, as in PEFT's add_weighted_adapter(combination_type="cat").

    Args:
        members: name for messages, adapter and scale of each, in the order of their ranks.

    Raises:
        AdapterRejected: a value is not finite, or the ranks of a layer are over ``max_rank``.
    """
    parts: dict[str, list[tuple[str, BoundTarget, float]]] = {}
    for name, bound, scale in members:
        try:
            bound.check_finite()
        except AdapterRejected as error:
            raise AdapterRejected(f"{name}: {error.message}") from error
        for path, target in bound.targets.items():
            parts.setdefault(path, []).append((name, target, scale))
    widest = max(parts, key=lambda path: sum(target.rank for _, target, _ in parts[path]))
    rank = sum(target.rank for _, target, _ in parts[widest])
    if rank > max_rank:
        (first, target, _), *others = sorted(parts[widest], key=lambda part: part[0])
        ranks = ", ".join([f"{first} has rank {target.rank}", *(f"{name} {one.rank}" for name, one, _ in others)])
        raise AdapterRejected(
            f"{ranks}: together {rank} at {widest}, TEMPER_MAX_LORA_RANK is {max_rank}: leave adapters out, merge them "
            "into one of a lower rank, or raise it"
        )
    return BoundAdapter(
        targets={path: _side_by_side(parts[path]) for path in target_shapes(config) if path in parts},
        rank=rank,
        alpha=float(rank),
        use_rslora=False,
        target_modules=name_targets(parts, config),
        module_prefix=config.module_prefix,
    )


def _side_by_side(parts: Sequence[tuple[str, BoundTarget, float]]) -> BoundTarget:
    """B holds the scales, in float32: what a slot rounds is rounded once, as of a single adapter."""
    largest = torch.finfo(torch.float32).max
    columns = [(part.b.float() * (part.scale * scale)).clamp_(-largest, largest) for _, part, scale in parts]
    a = torch.cat([part.a for _, part, _ in parts])
    return BoundTarget(a, torch.cat(columns, dim=1), float(a.shape[0]), 1.0)


class _Later(Mapping[str, BoundTarget]):
    """Targets that are bound when they are asked for."""

    def __init__(self, bind: Callable[[], Mapping[str, BoundTarget]]) -> None:
        self._bind = bind
        self._bound: Mapping[str, BoundTarget] | None = None

    def _targets(self) -> Mapping[str, BoundTarget]:
        if self._bound is None:
            self._bound = self._bind()
        return self._bound

    def __getitem__(self, path: str) -> BoundTarget:
        return self._targets()[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets())

    def __len__(self) -> int:
        return len(self._targets())


def name_targets(paths: Iterable[str], config: ModelConfig) -> tuple[str, ...]:
    """Sorted last names of linear layers, or their full paths where some layers of that name are not among them. PEFT
    and bind_adapter() read both the same way."""
    chosen = set(paths)
    partial = {path.rsplit(".", 1)[1] for path in target_shapes(config) if path not in chosen}
    last = {path: path.rsplit(".", 1)[1] for path in chosen}
    return tuple(sorted({path if name in partial else name for path, name in last.items()}))


def prefix_of(tensors: Iterable[str]) -> str:
    """Prefix of module names in the class that the keys of a file are of, "model." or
    "model.language_model.". PEFT writes those of one class only.

    Raises:
        AdapterRejected: there are keys of both.
    """
    first: dict[str, str] = {}
    for key in tensors:
        if match := _KEY.fullmatch(key):
            first.setdefault(match[1], key)
    if len(first) > 1:
        raise AdapterRejected(f"tensors {' and '.join(first.values())} have the keys of two classes of models")
    return next(iter(first), "model.")


def sort_tensors(tensors: Mapping[str, Tensor], expected: Container[str]) -> dict[tuple[str, str], tuple[str, Tensor]]:
    """(path, "A" or "B") → (key in the file, tensor); refuses what binds to nothing or twice."""
    found: dict[tuple[str, str], tuple[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in expected:
            frozen = ": experts and what chooses among them take no adapters" if _FROZEN.search(key) else ""
            raise AdapterRejected(
                f"tensor {key} binds to no linear layer that the adapter targets in this model{frozen}"
            )
        place = (match[2], match[3])
        if place in found:
            raise AdapterRejected(f"tensors {found[place][0]} and {key} bind to the same layer")
        found[place] = (key, tensor)
    return found


def _checked(
    halves: Mapping[tuple[str, str], tuple[str, Tensor]], path: str, half: str, shape: tuple[int, int], expected: str
) -> tuple[str, Tensor]:
    """Key in the file and tensor of one half of an adapter's layer."""
    if (path, half) not in halves:
        raise AdapterRejected(f"tensor {expected} is missing from the adapter")
    key, tensor = halves[path, half]
    if tuple(tensor.shape) != shape:
        raise AdapterRejected(f"tensor {key} has shape {list(tensor.shape)}, this model and rank need {list(shape)}")
    if tensor.dtype not in ADAPTER_DTYPES:
        raise AdapterRejected(f"tensor {key} is {tensor.dtype}: only float32, bfloat16 and float16 are supported")
    return key, tensor


def _finite(tensor: Tensor) -> bool:
    """A sum has what its terms have of NaN and infinity, and takes a fifth of the time of asking each; only one that is
    too large by itself makes that necessary."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
