"""The `temper` of a reader. On Linux what he types runs in a process forked from one that has imported the command
line, with his directory, variables and outputs: a page has up to twenty commands, and each would import for half a
second."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from tests.forked import ForkedProcess, command_line

_CLIENT = """#!/bin/sh
exec {python} -IS -c '
import json, os, socket, sys
asked = json.dumps([os.getpid(), os.getcwd(), sys.argv[2:], dict(os.environ)])
with socket.socket(socket.AF_UNIX) as door:
    door.connect(chr(0) + sys.argv[1])
    door.sendall(asked.encode())
    door.shutdown(socket.SHUT_WR)
    status = door.recv(8)
sys.exit(int(status or b"70"))
' {door} "$@"
"""


class TemperCommand:
    """Writes the command to a file and answers it until it is closed."""

    def __init__(self, file: Path) -> None:
        python, door = shlex.quote(sys.executable), f"temper-{uuid.uuid4().hex}"
        self._server = socket.socket(socket.AF_UNIX)
        if sys.platform == "linux":
            file.write_text(_CLIENT.format(python=python, door=door))
            self._server.bind("\0" + door)
            self._server.listen()
            threading.Thread(target=self._serve, daemon=True).start()
        else:
            file.write_text(f'#!/bin/sh\nexec {python} -m cli "$@"\n')
        file.chmod(0o755)

    def close(self) -> None:
        with suppress(OSError):  # it does not listen
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        asked = b""
        while part := connection.recv(65536):
            asked += part
        pid, directory, words, environment = json.loads(asked)
        outputs = Path(f"/proc/{pid}/fd")
        process = ForkedProcess(
            command_line,
            *words,
            environment=environment,
            directory=Path(directory),
            log=outputs / "2",
            output=outputs / "1",
        )
        connection.sendall(str(process.wait()).encode())
