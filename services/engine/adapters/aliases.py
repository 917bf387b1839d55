"""Aliases: the versions that adapter names and the attachment mean on this engine. They follow the object store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

import structlog

from services.common.adapters.composition import Composition, Published, versions_of
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry, Pointers
from services.common.errors import AdapterRejected, NotFound, Unavailable
from services.engine.adapters.drafter import FollowedDrafter
from services.engine.adapters.placement import NoFreeSlot
from services.engine.adapters.slot_table import Resident, SlotTable
from services.engine.observability.events import AdapterPhaseDone, EventStream
from services.engine.requests.adapter import AdapterChoice

_FLIP_SECONDS = 60.0
"""Longest wait for the loop to reach a boundary."""

log = structlog.get_logger(__name__)


class Loop(Protocol):
    """Engine loop as the adapter manager uses it. It is a Protocol because the loop is in a layer above this one."""

    def call_at_boundary(self, function: Callable[[], None]) -> Future[None]:
        """Runs a function on the loop thread between two steps; the future fails if the loop has stopped."""
        ...

    def retry_adapters(self) -> None:
        """Lets requests that wait for their adapter try `pin` again."""
        ...


class Aliases:
    """Aliases: the attached version and the current version of each name. A name in use gets a new version only once
    that is loaded, and never if it does not bind. `refresh` is for the I/O thread; all else needs the lock.

    Args:
        changed: guards ``table``, and what aliases mean.
        ensure: loads a version into a slot unless it is in one, for whoever asks; raises NoFreeSlot, AdapterRejected,
            ModelNotFound, Unavailable.
        flipped: called with the lock held once aliases mean something new.
        drafter: follows the pointers, too; None: there is none to follow.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        changed: threading.Condition,
        table: SlotTable,
        *,
        ensure: Callable[[AdapterChoice, Published], bool],
        flipped: Callable[[], None],
        events: EventStream,
        drafter: FollowedDrafter | None = None,
    ) -> None:
        self._registry = registry
        self._drafter = drafter
        self._changed = changed
        self._table = table
        self._ensure = ensure
        self._flipped = flipped
        self._events = events
        self.attached: AdapterVersion | None = None
        self.current: dict[str, int] = {}
        self._applied: str | None = None
        """Fingerprint of the applied pointers; None: the latest ones are not applied as a whole."""
        self.waiting: set[AdapterChoice] = set()
        """Aliases that get another version as soon as it has a slot."""
        self._compositions: set[AdapterChoice] = set()
        """Compositions in slots in which a member stands for its current version."""

    @property
    def settled(self) -> bool:
        """True if the pointers of the last look are all live."""
        return self._applied is not None

    def version_of(self, choice: AdapterChoice) -> Published | None:
        """Version that a choice means now; None: the base, or a name that is not known yet."""
        if choice.attached:
            return self.attached
        if choice.composition is not None:
            return choice.composition if choice.composition.fixed else choice.composition.fix(self.current)
        if choice.name is None:
            return None
        number = choice.version or self.current.get(choice.name)
        return None if number is None else AdapterVersion(choice.name, number)

    def learn(self, version: AdapterVersion) -> None:
        """Adds the current version of a name that was not among the pointers at the last look."""
        self.current.setdefault(version.name, version.version)
        # Apply the pointers again, even if they have not changed.
        self._applied = None

    def find(self, choice: AdapterChoice) -> Published | None:
        """The same as `version_of`, for the I/O thread: unknown names are looked up. Raises ModelNotFound."""
        with self._changed:
            version = self.version_of(choice)
        if version is not None or not choice.named:
            return version
        composition = choice.composition
        names = [choice.name] if composition is None else [one.name for one in composition.members if not one.version]
        for name in names:
            if name is not None and name not in self.current:
                found = self._registry.current(name)
                with self._changed:
                    self.learn(found)
        with self._changed:
            return self.version_of(choice)

    def loaded(self, choice: AdapterChoice) -> None:
        """Notes that what a choice means is in a slot. Needs the lock."""
        if choice.composition is not None and not choice.composition.fixed:
            self._compositions = {one for one in self._compositions if self._resident(one)} | {choice}

    def name_of(self, version: Published) -> str:
        """Name of a version as clients use it: without the number of a current one."""
        if isinstance(version, Composition):
            return str(version.loosen(self.current))
        return version.name if self.current.get(version.name) == version.version else str(version)

    def refresh(self, loop: Loop) -> bool:
        """Reads and applies the pointers; False: a version that should be live has no slot yet."""
        pointers = self._registry.pointers()
        settled = self._apply(pointers, loop)
        if self._drafter is not None:  # last: a drafter that takes long, or does not come, holds up no adapter
            self._drafter.refresh(pointers, lambda write: _at_boundary(loop, write))
        return settled

    def _apply(self, pointers: Pointers, loop: Loop) -> bool:
        if pointers.fingerprint == self._applied:
            return True
        self._applied = None
        self._forget_replaced(pointers.current)
        self.waiting = set()
        current = dict(pointers.current)
        for name, number in pointers.current.items():
            before = self.current.get(name)
            if before is not None and before != number and self._is_resident(AdapterVersion(name, before)):
                # In use: the new version is loaded before the name means it.
                live = self._go_live(AdapterChoice(name=name), AdapterVersion(name, number))
                current[name] = number if live else before
        attached = pointers.attached
        if attached is not None and attached != self.attached:
            live = self._go_live(AdapterChoice(attached=True), attached)
            attached = attached if live else self.attached
        self._compose_anew(current)
        self._flip(loop, attached, current)
        if self.waiting:
            return False
        self._applied = pointers.fingerprint
        return True

    def _go_live(self, alias: AdapterChoice, version: AdapterVersion) -> bool:
        """Loads a version that an alias will point to; False: it is refused, or waits for a slot."""
        try:
            self._ensure(alias, version)
        except NoFreeSlot:
            self.waiting.add(alias)
            return False
        except (AdapterRejected, NotFound) as error:
            log.error("adapter refused, the version before it stays live", version=str(version), reason=error.message)
            return False
        return True

    def _compose_anew(self, current: Mapping[str, int]) -> None:
        """Loads what the compositions in use will mean, so that their next requests need not wait. If that fails, the
        requests are told why: whoever composes an adapter with others holds up none of its versions."""
        with self._changed:
            self._compositions = {one for one in self._compositions if self._resident(one)}
            meanings = {one: (self.version_of(one), one.composition) for one in self._compositions}
        for choice, (before, composition) in meanings.items():
            after = None if composition is None else composition.fix(current)
            if after is None or after == before:
                continue
            try:
                self._ensure(choice, after)
            except NoFreeSlot:
                with self._changed:
                    self._table.leave(choice)
            except (AdapterRejected, NotFound) as error:
                log.error("composition refused", composition=str(after), reason=error.message)

    def _resident(self, choice: AdapterChoice) -> bool:
        version = self.version_of(choice)
        return version is not None and self._table.get(version) is not None

    def _is_resident(self, version: AdapterVersion) -> bool:
        with self._changed:
            return self._table.get(version) is not None

    def _forget_replaced(self, current: Mapping[str, int]) -> None:
        """Forgets versions whose adapter was deleted, or deleted and created again with other content."""
        with self._changed:
            loaded = [entry for entry in self._table.published if entry[0] != self.attached]
        for version, resident in loaded:
            if not self._still_exists(version, resident, current):
                with self._changed:
                    self._table.forget(version)

    def _still_exists(self, version: Published, resident: Resident, current: Mapping[str, int]) -> bool:
        members = versions_of(version)
        if any(member.name not in current for member in members):
            return False
        try:
            digests = [self._registry.manifest(member).digest for member in members]
        except NotFound:
            return False
        found = version.digest(digests) if isinstance(version, Composition) else digests[0]
        return found == resident.pin.digest

    def _flip(self, loop: Loop, attached: AdapterVersion | None, current: dict[str, int]) -> None:
        """Gives aliases their new versions, on the loop thread between two steps, unless they have them."""
        if (attached, current) == (self.attached, self.current):
            return

        def flip() -> None:
            with self._changed:
                if attached != self.attached:
                    log.info("attached", version=str(attached or "base"), before=str(self.attached or "base"))
                self.attached = attached
                self.current = current
                self._flipped()

        began = time.monotonic()
        _at_boundary(loop, flip)
        self._events.emit(AdapterPhaseDone("flip", time.monotonic() - began))


def _at_boundary(loop: Loop, function: Callable[[], None]) -> None:
    """Has the loop thread run a function between two steps. Raises Unavailable: it came to no boundary."""
    try:
        loop.call_at_boundary(function).result(_FLIP_SECONDS)
    except TimeoutError as error:
        raise Unavailable("the engine loop did not reach a step boundary") from error
