"""`python -m services.environments NAME`: the server of an environment."""

from __future__ import annotations

import argparse
import json
import sys

from services.environments.registry import ENVIRONMENTS
from services.environments.serve import serve
from services.environments.server import MOST_SESSIONS


def main() -> None:
    """Serves until it is interrupted; the first line on stdout says where."""
    parser = argparse.ArgumentParser(prog="python -m services.environments", description=__doc__)
    parser.add_argument("name", choices=sorted(ENVIRONMENTS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8430)
    parser.add_argument("--sessions", type=int, default=MOST_SESSIONS, help="connections at once")
    chosen = parser.parse_args()
    sys.stdout.write(json.dumps({"environment": chosen.name, "url": f"http://{chosen.host}:{chosen.port}"}) + "\n")
    sys.stdout.flush()
    serve(chosen.name, chosen.host, chosen.port, chosen.sessions)


if __name__ == "__main__":
    main()
