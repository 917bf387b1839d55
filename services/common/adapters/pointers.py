"""The pointers of adapters in the object store: which version is current, which one is attached, moved by If-Match."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.adapters.keys import attachment_key, current_key, removing_prefix
from services.common.adapters.manifest import Kind, Manifest
from services.common.adapters.names import AdapterVersion, check_adapter_name
from services.common.adapters.pointer_document import (
    Change,
    Pointer,
    attaching,
    kind_of,
    newest_of,
    of_kind,
    parse_attachment,
    rollback_change,
    with_move,
)
from services.common.errors import Conflict, InvalidRequest, ModelNotFound, Unavailable
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed
from services.common.storage.record_versions import FIELD, POINTER, PassOver, passing_over

RACES = 64
"""Lost compare-and-swap rounds after which a writer gives up."""


@dataclass(frozen=True, slots=True)
class Pointers:
    """Every pointer at one moment. ``fingerprint`` changes whenever one of them does."""

    attached: AdapterVersion | None
    current: Mapping[str, int]
    fingerprint: str
    drafters: frozenset[str] = frozenset()
    """Names among the current ones that are drafters'."""

    @property
    def adapters(self) -> dict[str, int]:
        """Current version of each name that is an adapter's."""
        return {name: number for name, number in self.current.items() if name not in self.drafters}


@dataclass(frozen=True, slots=True)
class Attachment:
    """What is attached to the base model's name, as it was read."""

    version: AdapterVersion | None
    pointer: tuple[Pointer, str] | None
    """The object with its etag; None: there is none."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """Result of a rollback."""

    before: AdapterVersion
    after: AdapterVersion
    attached: AdapterVersion | None
    """Version that is attached to the base model now, if it is of this adapter."""


class AdapterPointers(ABC):
    """Reads and moves the pointers. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore, served_model_name: str) -> None:
        self._store = store
        self.model = served_model_name
        self._attachment = attachment_key(served_model_name)
        self._pointer_cache: dict[str, tuple[str, int, Kind]] = {}
        """name → (etag, version, kind) of CURRENT as last read; replaced as a whole, so readers need no lock."""

    @property
    def store(self) -> ObjectStore:
        """Store in which everything lies."""
        return self._store

    @abstractmethod
    def manifest(self, version: AdapterVersion) -> Manifest:
        """Raises ModelNotFound if there is no such complete version."""

    @abstractmethod
    def versions(self, name: str) -> list[Manifest]:
        """Complete versions in ascending order; empty if there is no such adapter."""

    # Reading.

    def current(self, name: str) -> AdapterVersion:
        """Raises ModelNotFound if the adapter has no version."""
        pointer = self._read_json(current_key(check_adapter_name(name)))
        if pointer is None:
            raise ModelNotFound(f"adapter {name!r} does not exist", param="adapter")
        return AdapterVersion(name, int(pointer[0]["version"]))

    def newest(self, name: str) -> int:
        """Greatest number that has been current; 0: none has. Versions above it are candidates."""
        pointer = self._read_json(current_key(check_adapter_name(name)))
        return 0 if pointer is None else newest_of(pointer[0])

    def attached(self) -> AdapterVersion | None:
        """Version that the base model's name answers with; None: the base model itself."""
        return self.attachment().version

    def attachment(self) -> Attachment:
        """What is attached now, for `attach_instead`."""
        pointer = self._read_json(self._attachment)
        return Attachment(parse_attachment(pointer[0]) if pointer is not None else None, pointer)

    def pointers(self, pass_over: PassOver | None = None) -> Pointers:
        """All pointers, for polling: unchanged ones cost one HEAD each.

        Args:
            pass_over: told of the names whose current version a later release set. None: they are an error.

        Raises:
            NewerSchema: there is a pointer of a later release.
        """
        cache = self._pointer_cache
        fresh: dict[str, tuple[str, int, Kind]] = {}
        for name in self._store.list_dirs("adapters/"):
            etag = self._store.head(current_key(name))
            if etag is None:
                continue
            known = cache.get(name)
            if known is not None and known[0] == etag:
                fresh[name] = known
                continue
            pointer = None
            with passing_over(pass_over, name, None):
                pointer = self._read_json(current_key(name))
            if pointer is not None:
                fresh[name] = (pointer[1], int(pointer[0]["version"]), kind_of(pointer[0]))
        self._pointer_cache = fresh
        attached = self.attached()
        current = {name: version for name, (_, version, _) in fresh.items()}
        drafters = frozenset(name for name, (_, _, kind) in fresh.items() if kind == "drafter")
        fingerprint = hashlib.sha256(json.dumps([str(attached), sorted(current.items())]).encode()).hexdigest()
        return Pointers(attached=attached, current=current, fingerprint=fingerprint, drafters=drafters)

    def kind(self, name: str) -> Kind | None:
        """Kind of the versions of a name; None: it has none."""
        pointer = self._read_json(current_key(check_adapter_name(name)))
        if pointer is not None:
            return kind_of(pointer[0])
        candidates = self.versions(name)
        return candidates[0].kind if candidates else None

    def check_kind(self, name: str, kind: Kind) -> None:
        """Raises InvalidRequest if the versions of a name are of another kind than the one that is to be made."""
        found = self.kind(name)
        if found is not None and found != kind:
            other = f"{'an' if found == 'adapter' else 'a'} {found}"
            raise InvalidRequest(
                f"{name} is the name of {other}, and this would be {'an' if kind == 'adapter' else 'a'} {kind}: "
                "choose another name",
                param="adapter",
            )

    # Moving.

    def advance(self, manifest: Manifest) -> None:
        """Makes a new version current, unless it or a newer one has been before."""
        number = manifest.version

        def target(pointer: Pointer) -> Pointer | None:
            if number <= newest_of(pointer):
                return None
            return {**pointer, **of_kind(manifest.kind), "version": number, "newest": number}

        self._move(manifest.name, target)

    def set_current(
        self,
        version: AdapterVersion,
        *,
        only_from: int | None = None,
        by: str | None = None,
        request: str | None = None,
    ) -> int:
        """Moves the adapter's pointer, also backwards, and returns the number that was current; 0: none was.

        Args:
            only_from: the number that must be current now.
            by: what moves it, and does so once: nothing happens if it has before.
            request: for which request, for the pointer's history.

        Raises:
            ModelNotFound: there is no such version.
            Conflict: it is being removed, or another version is current than ``only_from``.
        """
        kind = self._check_kept(version).kind
        made = {name: value for name, value in {"by": by, "request": request}.items() if value is not None}
        before = 0

        def target(pointer: Pointer) -> Pointer | None:
            nonlocal before
            before = int(pointer.get("version", 0))
            if by is not None and any(move.get("by") == by for move in pointer.get("moves", [])):
                return None
            if only_from is not None and before != only_from:
                raise Conflict(
                    f"{version.name}@{before} has become current meanwhile, it was {version.name}@{only_from}: say "
                    "which version to go back to",
                    param="version",
                )
            if before == version.version:
                return None
            moves = with_move(pointer.get("moves", []), before, version.version, **made)
            newest = max(newest_of(pointer), version.version)
            return {**pointer, **of_kind(kind), "version": version.version, "newest": newest, "moves": moves}

        undo = self._move(version.name, target)
        self._check_still_kept(version, current_key(version.name), undo)
        return before

    def rollback(self, name: str, number: int | None = None, *, request: str | None = None) -> Rollback:
        """Makes an earlier version current; a newer version of the adapter that is attached goes back with it.

        Args:
            number: the version; None: the newest one below the current one.
            request: who asks: asked again under the same name, it finishes that rollback and makes no other.

        Raises:
            ModelNotFound: there is no such adapter or version.
            Conflict: there is no earlier version, or a publisher or another rollback came in between.
        """
        current = self.current(name)
        made = [move for move in self._moves(name) if request is not None and move.get("request") == request]
        if made:
            before, target = int(made[-1]["from"]), AdapterVersion(name, int(made[-1]["to"]))
        elif number is None:
            earlier = [manifest.version for manifest in self.versions(name) if manifest.version < current.version]
            if not earlier:
                raise Conflict(
                    f"{current} is the earliest version of {name} that is kept: there is none to go back to; detach "
                    "it, or give a version",
                    param="version",
                )
            target = AdapterVersion(name, max(earlier))
            before = self.set_current(target, only_from=current.version, request=request)
        else:
            target = AdapterVersion(name, number)
            before = self.set_current(target, request=request)
        attached = self.attached()
        overtaken = bool(made) and current != target  # by what came after: that decides what is attached
        if attached is not None and attached.name == name and attached > target and not overtaken:
            attached = self._attach(target, lambda now: now is not None and now.name == name and now > target)
        mine = attached if attached is not None and attached.name == name else None
        return Rollback(AdapterVersion(name, before), target, mine)

    def moves(self, name: str) -> list[dict[str, Any]]:
        """The newest rollbacks and promotions of an adapter, {"from", "to", "at" (unix seconds)} each, and "by" which
        canary; oldest first."""
        return [{what: said for what, said in move.items() if what != "request"} for move in self._moves(name)]

    def changes(self, seen: Mapping[str, str], name: str | None = None) -> tuple[list[Change], dict[str, str]]:
        """The newest moves of what is attached and of what is current, oldest first of each pointer, without those that
        canaries made, which tell of themselves; and key → etag of the pointers that were read.

        Args:
            seen: key → etag of pointers that need not be read again.
            name: read the pointer of this adapter, and none of another.
        """
        found: list[Change] = []
        etags: dict[str, str] = {}
        for one in [None, *(self._store.list_dirs("adapters/") if name is None else [name])]:
            key = self._attachment if one is None else current_key(one)
            etag = self._store.head(key)
            if etag is None or seen.get(key) == etag:
                continue
            pointer = self._read_json(key)
            if pointer is None:
                continue
            etags[key] = pointer[1]
            for move in pointer[0].get("moves", []):
                if one is not None and "by" in move:
                    continue
                found.append(self._attachment_change(move) if one is None else rollback_change(one, move))
        return found, etags

    def _attachment_change(self, move: Pointer) -> Change:
        after, before = move["to"], move["from"]
        kind = "adapter.detached" if after is None else "adapter.attached"
        return Change(self._attachment, move["at"], kind, {"adapter": after, "before": before, "model": self.model})

    def attach(self, version: AdapterVersion, *, forward_only: bool = False) -> AdapterVersion:
        """Plain requests for the base model are answered with this version from now on; returns what is attached.

        Args:
            forward_only: leave a newer version of the same adapter attached; for jobs, whose end may be repeated.

        Raises:
            ModelNotFound: there is no such version.
            Conflict: it is being removed.
            InvalidRequest: it is a drafter.
        """

        def wanted(now: AdapterVersion | None) -> bool:
            return not (forward_only and now is not None and now.name == version.name and now > version)

        return self._attach(version, wanted) or version

    def _attach(
        self, version: AdapterVersion, wanted: Callable[[AdapterVersion | None], bool]
    ) -> AdapterVersion | None:
        """Attaches the version if that is ``wanted`` instead of what is attached; returns what is attached then."""
        self._check_attachable(version)
        for _ in range(RACES):
            seen = self.attachment()
            if not wanted(seen.version):
                return seen.version
            if self.attach_instead(seen, version):
                return version
        raise Unavailable("what is attached to the base model kept changing; retry")

    def attach_instead(self, seen: Attachment, version: AdapterVersion) -> bool:
        """Attaches the version, unless somebody has attached or detached anything since; whether it did.

        Raises:
            ModelNotFound: there is no such version.
            Conflict: it is being removed.
            InvalidRequest: it is a drafter.
        """
        self._check_attachable(version)
        attached = attaching(version, seen.pointer)
        if not self._swap(self._attachment, seen.pointer, json.dumps(attached).encode()):
            return False
        before = seen.pointer[0] if seen.pointer is not None else {"adapter": None}
        self._check_still_kept(version, self._attachment, (before, attached))
        return True

    def detach(self, name: str, number: int | None = None) -> AdapterVersion | None:
        """Plain requests for the base model are answered by the base model again, if this adapter is attached; returns
        what was attached and is not this.

        Args:
            number: only if it is this version.
        """
        for _ in range(RACES):
            seen = self.attachment()
            now = seen.version
            if now is None or now.name != name or number not in (None, now.version):
                return now
            if self._swap(self._attachment, seen.pointer, json.dumps(attaching(None, seen.pointer)).encode()):
                return None
        raise Unavailable("what is attached to the base model kept changing; retry")

    # Parts.

    def _moves(self, name: str) -> list[Pointer]:
        pointer = self._read_json(current_key(check_adapter_name(name)))
        return list(pointer[0].get("moves", [])) if pointer is not None else []

    def _move(self, name: str, target: Callable[[Pointer], Pointer | None]) -> tuple[Pointer, Pointer] | None:
        """Writes what ``target`` makes of the pointer ({} if there is none); returns both, None if nothing moved."""
        for _ in range(RACES):
            pointer = self._read_json(current_key(name))
            before = pointer[0] if pointer is not None else {}
            target_now = target(before)
            if target_now is None:
                return None
            moved = POINTER.stamped(target_now)
            if self._swap(current_key(name), pointer, json.dumps(moved).encode()):
                return before, moved
        raise Unavailable(f"the pointer of adapter {name!r} kept moving; retry")

    def _check_attachable(self, version: AdapterVersion) -> None:
        """Raises InvalidRequest of a drafter, and what _check_kept raises."""
        self._check_kept(version).check_adapter()

    def _check_kept(self, version: AdapterVersion) -> Manifest:
        """The version's manifest. Raises ModelNotFound if there is no such version, Conflict if somebody is removing it
        right now."""
        manifest = self.manifest(version)
        if self._store.list(removing_prefix(version)):
            raise Conflict(f"{version} is being removed by retention: choose another version", param="version")
        return manifest

    def _check_still_kept(self, version: AdapterVersion, key: str, moved: tuple[Pointer, Pointer] | None) -> None:
        """Called once a pointer has been moved to a version. Whoever removes a version says so first and then looks at
        the pointers; here it is the other way round, so that one of the two sees the other and gives way."""
        try:
            self._check_kept(version)
        except (ModelNotFound, Conflict):
            pointer = self._read_json(key)
            if moved is not None and pointer is not None and pointer[0] == moved[1]:
                self._swap(key, pointer, json.dumps(moved[0]).encode())
            raise

    def _swap(self, key: str, pointer: tuple[dict[str, Any], str] | None, data: bytes) -> bool:
        """Writes a pointer, unless somebody has moved it since ``pointer`` was read; whether it did."""
        try:
            if pointer is None:
                self._store.put(key, data, if_absent=True)
            else:
                self._store.put(key, data, if_match=pointer[1])
        except PreconditionFailed:
            return False
        return True

    def _read_json(self, key: str) -> tuple[dict[str, Any], str] | None:
        """The object's JSON and its etag. Raises NewerSchema."""
        try:
            stored = self._store.get(key)
        except ObjectNotFound:
            return None
        pointer: Pointer = json.loads(stored.data)
        POINTER.check(pointer.get(FIELD), key)
        return pointer, stored.etag
