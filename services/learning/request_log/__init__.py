"""Request log: requests with their answers, from a spool on disk into parts in the object store, found in Redis."""
