"""Adapters that are loaded by path, which become versions like uploaded ones, and their end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from services.common.adapters.manifest import FileEntry, files_digest
from services.common.adapters.registry import Manifest
from services.common.errors import AdapterRejected, Conflict, InvalidRequest, ModelNotFound, NotFound, Unavailable
from services.common.shutdown import cancel_and_wait
from services.gateway.api.adapters.files import check_files
from services.gateway.api.adapters.routes import AdapterServices
from services.gateway.api.adapters.sources import read_directory, read_source

_RETRY_SECONDS = 2.0
log = structlog.get_logger(__name__)


async def load(adapters: AdapterServices, name: str, path: str, *, in_place: bool) -> Manifest:
    """Publishes the adapter at a path as the current version of a name. The same content twice is one version, also
    when several gateways load it at a time.

    Args:
        in_place: the name may have versions already; its next requests are answered by this one.

    Raises:
        Conflict: the name has a version, and it is not to be loaded in place.
        InvalidRequest, ModelNotFound, AdapterRejected, Unavailable: see read_source, check_files and
            AdapterCalls.validate.
    """
    adapters.registry.check_new_name(name)
    if not in_place and len(await adapters.threads.run(adapters.registry.versions, name)) > 0:
        raise Conflict(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            param="lora_name",
        )
    async with adapters.uploads:
        files = await adapters.threads.run(read_source, adapters.settings, adapters.registry, path)
        manifest = await _published(adapters, name, files, path)
    if await adapters.threads.run(adapters.registry.current, name) != manifest.ref:
        await adapters.threads.run(adapters.registry.set_current, manifest.ref)
    await adapters.calls.sync()
    return manifest


async def unload(adapters: AdapterServices, name: str) -> None:
    """Removes an adapter that was loaded by path.

    Raises:
        NotFound: there is no such adapter.
        InvalidRequest: it has versions that came another way, or one of it is attached.
    """
    manifests = await adapters.threads.run(adapters.registry.versions, name)
    if not manifests:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    if others := [str(one.ref) for one in manifests if one.loaded_from is None]:
        raise InvalidRequest(
            f"The lora adapter '{name}' has versions that were not loaded by a path ({', '.join(others[:3])}) and "
            f"would be lost: DELETE /v1/adapters/{name} removes them",
            param="lora_name",
        )
    try:
        await adapters.threads.run(adapters.registry.delete, name)
    except Conflict as error:
        raise InvalidRequest(error.message, param="lora_name") from error
    except ModelNotFound as error:  # another gateway was quicker
        raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name") from error
    await adapters.calls.sync()


async def _published(adapters: AdapterServices, name: str, files: Mapping[str, bytes], path: str) -> Manifest:
    digest = adapters.engines.served.info.digest
    await adapters.threads.run(check_files, dict(files))
    once = await asyncio.to_thread(_once, files)
    known = await adapters.threads.run(adapters.registry.published, name, once)
    if known is not None:
        return known
    await adapters.calls.validate(files)
    return await adapters.threads.run(
        lambda: adapters.registry.publish(name, files, base_digest=digest, once=once, loaded_from=path)
    )


def _once(files: Mapping[str, bytes]) -> str:
    """Name of a content, under which it is published once."""
    entries = {
        name: FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data)) for name, data in sorted(files.items())
    }
    return f"load-{files_digest(entries)}"


@dataclass(slots=True)
class AdapterDirectory:
    """Loads the adapters of TEMPER_ADAPTERS_DIR once when a gateway starts: each directory in it under its own name.
    A content that was loaded before changes nothing, so that a restart undoes neither a rollback nor a newer version.
    """

    adapters: AdapterServices
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, if there is such a directory."""
        if self.adapters.settings.adapters_dir is not None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends what is under way."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _run(self) -> None:
        root = self.adapters.settings.adapters_dir
        if root is None:
            return
        try:
            names = sorted(entry.name for entry in root.iterdir() if (entry / "adapter_config.json").is_file())
        except OSError as error:
            log.error("the directory of adapters cannot be read", directory=str(root), error=error.strerror)
            return
        while names:
            names = [name for name in names if not await self._settled(name)]
            await asyncio.sleep(_RETRY_SECONDS)

    async def _settled(self, name: str) -> bool:
        """Loads one, or refuses it; False: no engine, or no store, is there yet."""
        adapters = self.adapters
        root = adapters.settings.adapters_dir
        if root is None:
            return True
        try:
            adapters.registry.check_new_name(name)
            async with adapters.uploads:
                files = await adapters.threads.run(read_directory, root, name, adapters.settings.max_upload_bytes)
                manifest = await _published(adapters, name, files, name)
            await adapters.calls.sync()
        except Unavailable as error:
            log.info("an adapter of the directory waits", adapter=name, reason=error.message)
            return False
        except (AdapterRejected, InvalidRequest, ModelNotFound, Conflict) as error:
            log.error("an adapter of the directory was refused", adapter=name, reason=error.message)
            return True
        log.info("an adapter of the directory is served", adapter=str(manifest.ref))
        return True
