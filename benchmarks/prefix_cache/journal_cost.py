"""Cost of publishing the prefix cache's changes: `python -m benchmarks.prefix_cache.journal_cost [--tokens 768]`.

A request leaves two nodes in the cache, its prompt and its answer, with a snapshot each, and loses them again. Prints
one JSON line of microseconds of CPU a request: ``loop_us`` is spent by the engine loop's thread (journal and handing
over), ``publisher_us`` by the publisher's (hashing, encoding, sending). benchmarks.serving.host_step has what a step
costs that thread beside.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from services.engine.kv_cache.cache_journal import CacheJournal
from services.engine.kv_cache.keys import TOKEN_BYTES, namespace_of, tokens_to_bytes
from services.engine.kv_cache.radix_tree import Node, RadixTree
from services.engine.observability.events import CacheChanged
from services.engine.observability.kv_events import KvEventOptions, KvEventPublisher

_OPTIONS = KvEventOptions("tcp://127.0.0.1:*", "", "kv@engine@model", 10_000)
_VOCAB = 150_000


def nodes(requests: int, tokens: int) -> list[tuple[Node, Node]]:
    """Nodes of the prompt and of the answer of each request, two thirds and a third of its tokens."""
    tree, namespace, dice = RadixTree(), namespace_of("", ""), random.Random(1)
    found = []
    for _ in range(requests):
        text = tokens_to_bytes(dice.randrange(_VOCAB) for _ in range(tokens))
        prompt, _ = tree.descend(tree.root(namespace), text[: 2 * tokens // 3 * TOKEN_BYTES])
        answer, _ = tree.descend(prompt, text)
        for node in (prompt, answer):
            node.blocks, node.slot = [], 1
        found.append((prompt, answer))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path, help="file to append the result to")
    options = parser.parse_args()
    made = nodes(options.requests, options.tokens)
    journal, publisher = CacheJournal(), KvEventPublisher(_OPTIONS, options.block_size)
    began, process = time.thread_time(), time.process_time()
    for prompt, answer in made:
        journal.stored(prompt)
        journal.stored(answer)
        publisher.listen(CacheChanged(journal.take()))
    for prompt, answer in made:
        for node in (answer, prompt):
            journal.snapshot_removed(node)
            journal.removed(node)
        publisher.listen(CacheChanged(journal.take()))
    loop = time.thread_time() - began
    publisher.close()
    other = time.process_time() - process - loop
    figures = {
        f"{name}_us": round(1e6 * spent / len(made), 1) for name, spent in (("loop", loop), ("publisher", other))
    }
    facts = {"benchmark": "journal_cost", "tokens": options.tokens, "block_size": options.block_size}
    put_line(facts | figures | environment(), options.out)


if __name__ == "__main__":
    main()
