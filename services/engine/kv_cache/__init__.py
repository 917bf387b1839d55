"""Block pool, state pool, radix tree, prefix cache, eviction, memory plan."""
