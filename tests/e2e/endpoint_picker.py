"""Model of an endpoint picker with precise prefix routing, as llm-d's router (ebab687) is one for the Gateway API's
inference extension: it scrapes pods, indexes their KV events, asks for a prompt's tokens, and names an endpoint in the
header by which a proxy routes (the extension's docs/proposals/004-endpoint-picker-protocol)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

DESTINATION = "x-gateway-destination-endpoint"
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Load:
    """What a picker reads of a pod, by vLLM's names."""

    waiting: float
    running: float
    kv_cache: float
    """Share of the cache that is used."""
    adapters: frozenset[str]
    max_adapters: int
    block_size: int

    @classmethod
    def of(cls, text: str) -> Load:
        """Of a scrape. Raises KeyError: a series is missing."""
        found = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
        lora, cache = (found[f"vllm:{name}"].labels for name in ("lora_requests_info", "cache_config_info"))
        waiting, running, used = (
            found[f"vllm:{name}"].value
            for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
        )
        names = (lora["running_lora_adapters"] + "," + lora["waiting_lora_adapters"]).split(",")
        return cls(
            waiting,
            running,
            used,
            frozenset(name for name in names if name),
            int(lora["max_lora"]),
            int(cache["block_size"]),
        )


@dataclass
class Picker:
    """Picks the pod with the longest consecutive prefix from block 0, among equal ones that with the least load."""

    pods: Mapping[str, str]
    """Pod, as topics of events name it → its endpoint, "ip:port"."""
    block_size: int
    served: str
    _of_block: dict[tuple[str, int], Key] = field(default_factory=dict)
    """Pod and an engine's hash → the key of the picker's own."""
    _holders: dict[Key, set[str]] = field(default_factory=dict)

    def take(self, topic: bytes, payload: bytes) -> None:
        """Takes a message of a pod (pkg/kvevents): events of groups that index no prefixes are passed over, and text
        among extra keys is the identifier of a picture, where anything else is nothing."""
        _, pod, model = topic.decode().split("@")
        for tag, *fields in msgspec.msgpack.decode(payload)[1]:
            if tag == "AllBlocksCleared":
                for holders in self._holders.values():
                    holders.discard(pod)
            elif tag == "BlockRemoved":
                for one in fields[0]:
                    key = self._of_block.pop((pod, one), None)
                    self._holders.get(key or (), set()).discard(pod)
            elif fields[9] == "full_attention":
                hashes, parent, tokens, size, _, _, adapter, extra = fields[:8]
                if parent is not None and (pod, parent) not in self._of_block:
                    continue  # its beginning was told before this picker listened
                start = self._of_block[pod, parent] if parent is not None else (adapter or model,)
                pictures = [
                    [one for one in keys or () if isinstance(one, str)] for keys in extra or [None] * len(hashes)
                ]
                for one, key in zip(hashes, self._keys(start, tokens, pictures, size), strict=True):
                    self._of_block[pod, one] = key
                    self._holders.setdefault(key, set()).add(pod)

    def matched(self, model: str, tokens: Sequence[int]) -> int:
        """Blocks of a prompt that the pod with the most of them has."""
        return max(self._matched(model, tokens).values())

    def pick(self, model: str, tokens: Sequence[int], loads: Mapping[str, Load]) -> tuple[str, int]:
        """The endpoint, and how many blocks of the prompt it has."""
        matched = self._matched(model, tokens)
        best = max(self.pods, key=lambda pod: (matched[pod], -loads[pod].waiting - loads[pod].running))
        return self.pods[best], matched[best]

    def _matched(self, model: str, tokens: Sequence[int]) -> dict[str, int]:
        matched = dict.fromkeys(self.pods, 0)
        full = len(tokens) // self.block_size * self.block_size
        nothing: list[list[str]] = [[]] * (full // self.block_size)
        for number, key in enumerate(self._keys((model,), tokens[:full], nothing, self.block_size)):
            for pod in self._holders.get(key, ()):
                if matched[pod] == number:
                    matched[pod] += 1
        return matched

    @staticmethod
    def _keys(start: Key, tokens: Sequence[int], pictures: Sequence[Sequence[str]], size: int) -> Iterator[Key]:
        key = start
        for number, seen in enumerate(pictures):
            key = (hash(key), *tokens[number * size : (number + 1) * size], *seen)
            yield key


async def tokens_of(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], served: str) -> list[int]:
    """Tokens of a request, as the picker's tokenizer asks a renderer for them: the body as it is, to the base model."""
    answer = (await client.post(f"{path}/render", json={**body, "model": served})).raise_for_status().json()
    found: list[int] = answer[0]["token_ids"] if isinstance(answer, list) else answer["token_ids"]
    return found
