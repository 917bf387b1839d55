"""Merging adapters as a job: a step is one layer of the model, so it reports, resumes and is cancelled like training.

Factors are small and stay on the CPU. What works on entries of whole matrices (ties, dare) runs on the model's device,
in pieces through the compute gate; its memory is counted like a training job's. On a GPU without room for it the CPU
does it, and the job says so.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch

from services.adapter_tools.low_rank import Factors
from services.adapter_tools.merge import Merged, Weighted, merge_layer, working_bytes
from services.adapter_tools.workshop import ALONE, Workshop
from services.common.adapters.manifest import Lineage, LineageParent
from services.common.errors import DoesNotFit, InvalidRequest
from services.common.jobs import MergeJob
from services.common.jobs.kinds.merge import exact_sum_over
from services.engine.models.lora.binding import BoundAdapter, BoundTarget, bind_adapter, name_targets
from services.engine.models.lora.trainable import LoraParams, TrainableTarget
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import spec_digest
from services.trainer.jobs.base import RunState
from services.trainer.memory.budget import MemoryNeed
from services.trainer.memory.estimate import mib
from services.trainer.parent_versions import ParentVersion


class MergeRun:
    """A prepared merge; see JobRun."""

    def __init__(self, spec: MergeJob, host: PolicyHost, sources: Sequence[ParentVersion]) -> None:
        """Binds every source strictly.

        Raises:
            InvalidRequest: the engine could not serve a result of this rank.
            AdapterRejected: a source does not bind to the base model.
            DoesNotFit: the memory plan of a CPU leaves too little.
            MemoryTaken: it would fit, but not beside the open sessions.
        """
        if len(sources) != len(spec.sources):
            raise ValueError(f"{len(sources)} adapters given for {len(spec.sources)} sources")
        self._spec = spec
        self._config = host.model.config
        self._sources = list(sources)
        self._parents: list[BoundAdapter] = [
            bind_adapter(source.files, self._config, max_rank=host.max_lora_rank) for source in sources
        ]
        paths = {path for parent in self._parents for path in parent.targets}
        self._layers = [
            [path for path in sorted(paths) if int(path.split(".")[1]) == layer]
            for layer in sorted({int(path.split(".")[1]) for path in paths})
        ]
        self._merged: dict[str, Merged] = {}
        self._check_rank(host.max_lora_rank)
        self._memory = 0
        self._memory_budget = host.memory_budget
        self._shop = self._reserved(host)

    def _reserved(self, host: PolicyHost) -> Workshop:
        """Workshop of the merge, with the memory for its largest layer reserved."""
        shop = Workshop(host.model.device, host.gate)
        self._memory = max(self._bytes(path, shop) for layer in self._layers for path in layer)
        self._train_memory = host.train_memory_bytes
        if self._memory <= self._train_memory:
            host.memory_budget.reserve_job(MemoryNeed(resident=0, working=self._memory))
            return shop
        if shop.device.type != "cpu":
            return ALONE
        raise DoesNotFit(
            f"the merge needs {mib(self._memory)} for its largest layer, and the memory plan leaves "
            f"{mib(self._train_memory)} for training: merge by weighted or svd, which work on the factors, or give the "
            "engine more memory for training (TEMPER_TRAIN_MEMORY_BYTES)",
            param="method",
        )

    def _bytes(self, path: str, shop: Workshop) -> int:
        targets = self._targets(path)
        shape = (targets[0].b.shape[0], targets[0].a.shape[1])
        return working_bytes(shape, len(targets), self._spec, shop)

    def _check_rank(self, highest: int) -> None:
        if self._spec.rank is not None:
            if self._spec.rank > highest:
                raise InvalidRequest(
                    f"rank is {self._spec.rank}, but the engine serves adapters up to rank {highest} "
                    "(TEMPER_MAX_LORA_RANK): choose a lower one",
                    param="rank",
                )
            return
        needed = max(sum(target.rank for target in self._targets(path)) for layer in self._layers for path in layer)
        if needed > highest:
            raise exact_sum_over(needed, highest)

    @property
    def total_steps(self) -> int:
        """Layers that any source adapts."""
        return len(self._layers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Note that names the merged versions."""
        parts = [
            f"{source.weight:g} × {source_version.version} (rank {parent.max_rank}, {len(parent.targets)} layers)"
            for source, source_version, parent in zip(self._spec.sources, self._sources, self._parents, strict=True)
        ]
        said = [f"merging by {self._spec.method}: " + ", ".join(parts)]
        if self._memory > self._train_memory:
            said.append(
                f"on the CPU: the largest layer needs {mib(self._memory)}, and the memory plan leaves "
                f"{mib(self._train_memory)} of the device for training"
            )
        return tuple(said)

    @property
    def lora(self) -> LoraParams:
        """The layers that are merged so far. Their scale is 1: the weights are in the factors."""
        targets = {
            path: TrainableTarget(merged.a, merged.b, alpha=float(merged.a.shape[0]), scale=1.0)
            for path, merged in self._merged.items()
        }
        return LoraParams(
            targets,
            use_rslora=False,
            target_modules=name_targets(targets, self._config),
            module_prefix=self._config.module_prefix,
        )

    def files(self, base_model_name: str) -> dict[str, bytes]:
        """See JobRun.files."""
        return self.lora.to_files(base_model_name)

    @property
    def outcome(self) -> tuple[str, ...]:
        """See JobRun.outcome."""
        return ()

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings of a merge; they are all in its spec."""
        return {}

    @property
    def defaults(self) -> Mapping[str, float]:
        """See settings."""
        return {}

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.examine: nothing is learnt."""
        del interrupt
        return {}

    @property
    def lineage(self) -> Lineage:
        """Parents, method and what the rank cut off."""
        spec = self._spec
        return Lineage(
            method=spec.method,
            parents=tuple(
                LineageParent(version=str(source_version.version), weight=source.weight, digest=source_version.digest)
                for source, source_version in zip(spec.sources, self._sources, strict=True)
            ),
            rank=spec.rank,
            density=spec.density,
            scale=spec.scale,
            seed=spec.seed,
            error_max=max(merged.error for merged in self._merged.values()),
            error_mean=sum(merged.error for merged in self._merged.values()) / len(self._merged),
            worst_layer=max(self._merged, key=lambda path: self._merged[path].error),
        )

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """A merge has nothing to evaluate on."""
        del interrupt
        return {}

    @torch.no_grad()
    def step(self, index: int, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Merges one layer of the model; see JobRun.step."""
        if not 0 <= index < self.total_steps:
            raise ValueError(f"step {index} of {self.total_steps}")
        done: dict[str, Merged] = {}
        for path in self._layers[index]:
            interrupt()
            try:
                done[path] = self._merge(path)
            except torch.OutOfMemoryError as error:
                _forget(error)
                self._memory_budget.out_of_memory()
                raise DoesNotFit(
                    f"the device ran out of memory while it merged {path}, although the merge's plan of "
                    f"{mib(self._memory)} is within the {mib(self._train_memory)} for training: something else takes "
                    "more than its share. Give the engine less of the device (TEMPER_MEMORY_FRACTION), or merge by "
                    "weighted or svd, which need none of it",
                    param="method",
                ) from error
        self._merged |= done
        errors = [merged.error for merged in self._merged.values()]
        return {
            "merged_layers": float(len(errors)),
            "merge_error_max": max(errors),
            "merge_error_mean": sum(errors) / len(errors),
        }

    def _merge(self, path: str) -> Merged:
        parents = [
            Weighted(_factors(parent.targets[path]), source.weight, place)
            for place, (parent, source) in enumerate(zip(self._parents, self._spec.sources, strict=True))
            if path in parent.targets
        ]
        return merge_layer(path, parents, self._spec, self._spec.seed, self._shop)

    def close(self) -> None:
        """See JobRun.close."""

    def state(self) -> RunState:
        """See JobRun.state."""
        tensors = {f"{path}.lora_A": merged.a.clone() for path, merged in self._merged.items()}
        tensors |= {f"{path}.lora_B": merged.b.clone() for path, merged in self._merged.items()}
        errors = {path: merged.error for path, merged in self._merged.items()}
        return RunState(tensors, {"spec": spec_digest(self._spec), "errors": errors})

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        if state.data.get("spec") != spec_digest(self._spec):
            raise InvalidRequest("the checkpoint belongs to another job")
        errors: dict[str, float] = state.data["errors"]
        finished = 0
        while finished < self.total_steps and all(path in errors for path in self._layers[finished]):
            finished += 1
        known = {path for layer in self._layers[:finished] for path in layer}
        if known != errors.keys():
            raise InvalidRequest("the checkpoint does not fit the layers of these adapters")
        self._merged = {
            path: Merged(state.tensors[f"{path}.lora_A"], state.tensors[f"{path}.lora_B"], error)
            for path, error in errors.items()
        }
        return finished

    def _targets(self, path: str) -> list[BoundTarget]:
        return [parent.targets[path] for parent in self._parents if path in parent.targets]


def _factors(target: BoundTarget) -> Factors:
    return Factors(target.a.double(), target.b.double() * target.scale)


def _forget(error: BaseException) -> None:
    """Drops what an error's frames hold."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
