"""Request log: what was asked and answered, in parts in the object store, found by an index in Redis."""
