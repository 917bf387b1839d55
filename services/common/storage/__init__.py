"""Redis and the object store: connections, conditional writes, files, versions of records."""
