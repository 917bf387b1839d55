"""Adapter names, versions, manifests, pointers and the registry in the object store."""
