"""Writing of the request log: recordings of running requests, a spool on disk, parts in the object store."""
