"""Log of changes that a local object store keeps beside its objects: SeaweedFS writes every change down, and never
removes what it wrote."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import urllib3

from cli.local.ports import LOOPBACK
from cli.local.private_tls import PrivateTls

PLACE = "/topics/.system/log"
KEPT = timedelta(minutes=15)
"""Age to which the log stays: who reads it are parts of the same process, which are seconds behind."""
_EVERY_SECONDS = 60.0
_MOST = 60
"""Files that one look removes: a minute makes one."""
_LONGEST_SECONDS = 2.0
"""Longest look, beside the request under way: whoever looks after processes waits for it."""


class ChangeLog:
    """Removes what is old in the log of changes.

    Args:
        port: of the server's filer on loopback.
        tls: the certificate that it asks for.
        kept: age to which files stay.
    """

    def __init__(self, port: int, tls: PrivateTls, kept: timedelta = KEPT) -> None:
        self._kept = kept
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(2.0),
            retries=False,
            cert_file=str(tls.certificate),
            key_file=str(tls.key),
            ca_certs=str(tls.certificate),
        )
        self._url = f"https://{LOOPBACK}:{port}"
        self._look_at = 0.0

    def tidy(self) -> None:
        """Removes the oldest files, if a minute has gone since the last time; a server that is away has them removed
        another time."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _EVERY_SECONDS
        try:
            self._remove(datetime.now(UTC) - self._kept)
        except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError):
            return

    def _remove(self, before: datetime) -> None:
        left, until = _MOST, time.monotonic() + _LONGEST_SECONDS
        for day in self._entries(PLACE):
            files = self._entries(day["FullPath"])
            old = [file for file in files if datetime.fromisoformat(file["Mtime"]) < before]
            for file in old[:left]:
                if time.monotonic() > until:
                    return
                self._pool.request("DELETE", self._url + file["FullPath"])
            if not files and datetime.fromisoformat(day["Mtime"]) < before:
                self._pool.request("DELETE", self._url + day["FullPath"], fields={"recursive": "true"})
            left -= len(old)
            if left <= 0:
                return

    def _entries(self, directory: str) -> list[dict[str, Any]]:
        """Entries of a directory by name; none of one that is not there."""
        asked = {"accept": "application/json"}
        answer = self._pool.request("GET", f"{self._url}{directory}/", fields={"limit": "2000"}, headers=asked)
        return json.loads(answer.data)["Entries"] or [] if answer.status == 200 else []
