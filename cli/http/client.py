"""The gateway's HTTP API from the command line's side: requests, server-sent events, errors as CliError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import quote

import httpx

from cli.output import CliError, ExitCode
from cli.settings import CliSettings

_BLOCK = 2**20
_RETRYABLE = {429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event: its id (empty: none), its type and its data."""

    id: str
    event: str
    data: str


class Client:
    """A connection to one gateway. Every failure is a CliError with the exit code that fits."""

    def __init__(self, url: str | None, settings: CliSettings) -> None:
        self.url = (url or settings.url).rstrip("/")
        headers = {}
        if key := settings.key_for(url):
            headers["authorization"] = f"Bearer {key}"
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(settings.request_timeout, connect=5.0),
                # A gateway on this machine is not behind the proxy of the environment.
                trust_env=not is_local(self.url),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise CliError(f"{self.url!r} is not a URL: {error}", ExitCode.USAGE) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: str | int | Sequence[str]) -> Any:
        """``params``: of the query, which ``path`` has none of; a sequence is a parameter for each of its texts."""
        return self._json("GET", path, params=params)

    def find(self, path: str, **params: str | int) -> Any | None:
        """As ``get``; None: there is no such thing."""
        with self._failures():
            response = self._http.request("GET", path, params=params)
        return None if response.status_code == HTTPStatus.NOT_FOUND else self._read(response)

    def post(
        self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, patient: bool = False
    ) -> Any:
        """``patient``: however long it takes; the server has a limit of its own."""
        options: dict[str, Any] = {"timeout": httpx.Timeout(None, connect=5.0)} if patient else {}
        return self._json("POST", path, json=body, headers=dict(headers or {}), **options)

    def put(self, path: str, body: Any) -> Any:
        return self._json("PUT", path, json=body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def upload(
        self,
        path: str,
        fields: Mapping[str, str],
        files: Mapping[str, Path],
        *,
        on_block: Callable[[int], None] = lambda _: None,
    ) -> Any:
        """Multipart form of text fields and files, streamed from disk.

        Args:
            on_block: called with the number of bytes of each piece of a file.
        """
        with contextlib.ExitStack() as stack:
            parts: dict[str, Any] = {
                name: (file.name, _Told(stack.enter_context(file.open("rb")), on_block)) for name, file in files.items()
            }
            return self._json("POST", path, data=dict(fields), files=parts, timeout=None)

    def send_file(
        self,
        method: str,
        path: str,
        file: Path,
        *,
        on_block: Callable[[int], None] = lambda _: None,
        **params: str | int,
    ) -> Any:
        """A file as the body, streamed from disk.

        Args:
            on_block: called with the number of bytes of each piece.
        """
        with file.open("rb") as source:

            def blocks() -> Iterator[bytes]:
                while block := source.read(_BLOCK):
                    yield block
                    on_block(len(block))

            headers = {"content-type": "application/octet-stream", "content-length": str(file.stat().st_size)}
            return self._json(method, path, content=blocks(), headers=headers, params=params, timeout=None)

    def download(
        self, path: str, target: Path, *, on_block: Callable[[int], None] = lambda _: None, **params: str | int
    ) -> str:
        """Writes the body to ``target`` by way of a neighbour, so that a failure leaves no half file.

        Args:
            on_block: called with the number of bytes of each piece.

        Returns:
            The adapter version that the server says it sent.
        """
        scratch = target.with_name(target.name + ".part")
        try:
            with self._stream("GET", path, params=params) as response, scratch.open("wb") as file:
                for block in response.iter_bytes():
                    file.write(block)
                    on_block(len(block))
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        return str(response.headers.get("x-temper-adapter", ""))

    def events(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        last_event_id: str | None = None,
        patience: float | None = None,
        on_silence: Callable[[], None] = lambda: None,
    ) -> Iterator[ServerEvent]:
        """Server-sent events until the server ends the stream.

        Args:
            patience: seconds without a sign of life after which the connection counts as broken, if less than usual.
            on_silence: called at every sign of life that is not an event; may raise.
        """
        headers = {"accept": "text/event-stream"}
        if last_event_id:
            headers["last-event-id"] = last_event_id
        with self._stream(method, path, patience, json=body, headers=headers) as response:
            yield from _parse_events(response.iter_lines(), on_silence)

    def _json(self, method: str, path: str, **options: Any) -> Any:
        with self._failures():
            response = self._http.request(method, path, **options)
        return self._read(response)

    def _read(self, response: httpx.Response) -> Any:
        if response.status_code >= 400:
            raise _refusal(response)
        try:
            return response.json()
        except ValueError as error:
            raise CliError(
                f"{self.url} is not a Temper gateway: its answer is not JSON", ExitCode.UNREACHABLE
            ) from error

    @contextlib.contextmanager
    def _stream(
        self, method: str, path: str, patience: float | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        # The server sends a comment line at least every 15 seconds.
        timeout = httpx.Timeout(60.0 if patience is None else min(60.0, patience), connect=5.0)
        with self._failures(), self._http.stream(method, path, timeout=timeout, **options) as response:
            if response.status_code >= 400:
                response.read()
                raise _refusal(response)
            yield response

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise CliError(
                f"no Temper at {self.url} ({error}): start one with `temper up`, or name it with --url or TEMPER_URL",
                ExitCode.UNREACHABLE,
            ) from error
        except httpx.UnsupportedProtocol as error:
            raise CliError(f"{self.url!r} is not an http:// or https:// URL", ExitCode.USAGE) from error
        except httpx.TimeoutException as error:
            raise CliError(f"{self.url} did not answer in time", ExitCode.UNREACHABLE) from error
        except httpx.TransportError as error:
            raise CliError(f"the connection to {self.url} broke: {error}", ExitCode.UNREACHABLE) from error


class _Told:
    """File that tells what is read of it; otherwise as it is."""

    def __init__(self, file: BinaryIO, on_block: Callable[[int], None]) -> None:
        self._file, self._on_block = file, on_block

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._on_block(len(block))
        return block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def path(*segments: str) -> str:
    """A URL path of these segments, each quoted."""
    return "/" + "/".join(quote(segment, safe="@") for segment in segments)


def is_local(url: str) -> bool:
    """Whether a URL is of this machine, by its name."""
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")


def _refusal(response: httpx.Response) -> CliError:
    """The OpenAI error body as one line."""
    error: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        body = response.json()
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            error = body["error"]
    message = str(error.get("message") or f"{response.request.url} answered {response.status_code}")
    if response.status_code == 401:
        message += " (the key of these commands is TEMPER_API_KEY)"
    code = ExitCode.UNREACHABLE if response.status_code in _RETRYABLE else ExitCode.FAILED
    return CliError(message, code, error=error or {"message": message})


def _parse_events(lines: Iterator[str], on_silence: Callable[[], None]) -> Iterator[ServerEvent]:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation"""
    identity, kind, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(identity, kind, "\n".join(data))
            kind, data = "message", []
            continue
        if line.startswith(":"):
            on_silence()
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id":
            identity = value


def parse_json(text: str) -> Any:
    """JSON of an event's data."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise CliError(f"the server sent an event that is not JSON: {text[:80]!r}", ExitCode.UNREACHABLE) from error
