"""As much of a Kubernetes API as a chart's `lookup` asks for: what kinds there are, and objects by their names."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

_KINDS = (("secrets", "Secret"), ("persistentvolumeclaims", "PersistentVolumeClaim"))
_NONE: Mapping[str, Any] = {
    "apiVersion": "v1",
    "kind": "Status",
    "status": "Failure",
    "reason": "NotFound",
    "code": 404,
}


@contextmanager
def serving(objects: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> Iterator[str]:
    """A kubeconfig of a server that has these objects, by namespace, plural and name. They may be changed meanwhile."""

    class Api(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            found: Mapping[str, Any] | None = None
            if parts == ["api"]:
                found = {"kind": "APIVersions", "versions": ["v1"]}
            elif parts == ["apis"]:
                found = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
            elif parts == ["api", "v1"]:
                kinds = [{"name": many, "kind": kind, "namespaced": True, "verbs": ["get"]} for many, kind in _KINDS]
                found = {"kind": "APIResourceList", "groupVersion": "v1", "resources": kinds}
            elif parts[:3] == ["api", "v1", "namespaces"] and len(parts) == 6:
                found = objects.get((parts[3], parts[4], parts[5]))
            body = json.dumps(_NONE if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "users": [{"name": "it", "user": {}}],
    }
    try:
        yield yaml.safe_dump(config)
    finally:
        server.shutdown()
        server.server_close()
