"""Where the table of API keys is kept: a file, or a hash in Redis that all gateways share.

Owns reading, and changing without losing what another process changes meanwhile. It must not know requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from libs.config import ConfigError
from libs.errors import StoreUnavailable
from libs.obs import get_logger
from services.gateway.api_keys import KeyTable, read_table, write_table
from services.gateway.identity import Authenticator

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = get_logger("keys")

Change = Callable[[KeyTable], KeyTable]

REDIS_KEY: Final = "octavo:api_keys"
_DOCUMENT, _VERSION = "document", "version"
_MAX_DOCUMENT_BYTES: Final = 64 * 1024 * 1024
_MAX_CHANGE_ATTEMPTS: Final = 16


class KeyStore(Protocol):
    """A place for the table."""

    async def version(self) -> str:
        """Return what differs whenever the table does; raises ConfigError or StoreUnavailable."""

    async def read(self) -> KeyTable:
        """Return the table; raises ConfigError or StoreUnavailable."""

    async def change(self, change: Change) -> None:
        """Replace the table by what ``change`` makes of it; raises ConfigError or StoreUnavailable."""


class KeyFile:
    """The table in a file, which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def version(self) -> str:
        """Return the file's identity, size and time."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"

    async def read(self) -> KeyTable:
        """Read the file in a thread."""
        return await asyncio.to_thread(self.read_now)

    def read_now(self) -> KeyTable:
        """Read the file; raises ConfigError."""
        try:
            with self._path.open("rb") as file:
                document = file.read(_MAX_DOCUMENT_BYTES + 1)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(document) > _MAX_DOCUMENT_BYTES:
            raise ConfigError(f"The API keys file {self._path} is too large.")
        return read_table(document, f"The API keys file {self._path}")

    async def change(self, change: Change) -> None:
        """Write a changed file beside the old one and put it in its place; one process at a time does so."""
        lock_path = self._path.with_name(f"{self._path.name}.lock")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with lock_path.open("a") as lock:
                await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
                table = self.read_now() if self._path.exists() else KeyTable()
                self._replace(write_table(change(table)))
        except OSError as error:
            raise ConfigError(f"The API keys file {self._path} cannot be written: {error}.") from error

    def _replace(self, document: bytes) -> None:
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(document)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"The API keys file {self._path} cannot be read: {error.strerror}. "
            f"`octavo keys add --tenant TENANT --file {self._path}` makes one."
        )


class KeysInRedis:
    """The table in a Redis hash of two fields: the document, and its digest, which is cheap to ask for."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def version(self) -> str:
        """Return the document's digest; empty where there is none yet."""
        from redis.exceptions import RedisError

        try:
            return str(await self._redis.hget(REDIS_KEY, _VERSION) or "")
        except RedisError as error:
            raise _unavailable(error) from error

    async def read(self) -> KeyTable:
        """Read the document."""
        from redis.exceptions import RedisError

        try:
            return _table_of(await self._redis.hget(REDIS_KEY, _DOCUMENT))
        except RedisError as error:
            raise _unavailable(error) from error

    async def change(self, change: Change) -> None:
        """Write a changed document, again when another process was quicker."""
        from redis.exceptions import RedisError, WatchError

        try:
            async with self._redis.pipeline() as pipeline:
                for _ in range(_MAX_CHANGE_ATTEMPTS):
                    await pipeline.watch(REDIS_KEY)
                    table = _table_of(await pipeline.hget(REDIS_KEY, _DOCUMENT))
                    document = write_table(change(table)).decode()
                    pipeline.multi()  # type: ignore[no-untyped-call]  # redis-py declares no types here.
                    version = hashlib.sha256(document.encode()).hexdigest()
                    pipeline.hset(REDIS_KEY, mapping={_DOCUMENT: document, _VERSION: version})
                    try:
                        await pipeline.execute()
                    except WatchError:
                        continue
                    return
        except RedisError as error:
            raise _unavailable(error) from error
        raise StoreUnavailable("The API keys in Redis change all the time; try again.")


class KeyWatch:
    """Keeps a gateway's keys as new as their store's.

    While the store cannot be read, the keys that were read last are good: an outage of it must not be one of ours.
    """

    def __init__(self, store: KeyStore, authenticator: Authenticator, *, poll_seconds: float) -> None:
        self._store = store
        self._authenticator = authenticator
        self._poll_seconds = poll_seconds
        self._version: str | None = None
        self._failure = ""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.refresh()
            except (ConfigError, StoreUnavailable) as error:
                self._report(str(error))
            else:
                self._failure = ""
            await asyncio.sleep(self._poll_seconds)

    async def refresh(self) -> None:
        """Take over the table if it is another; raises ConfigError or StoreUnavailable."""
        # Asked before the table is read: what changes in between is found at the next look.
        version = await self._store.version()
        if version == self._version:
            return
        if not version and self._version:
            raise StoreUnavailable("The table of API keys is gone from its store; `octavo keys add` makes one.")
        table = await self._store.read()
        self._authenticator.use(table)
        self._version = version
        log.info("API keys read", num_keys=len(table.keys))
        if not table.keys:
            log.warning("there is no API key; every request is refused")

    def _report(self, failure: str) -> None:
        """Log a failure once, not at each look."""
        if failure != self._failure:
            log.error("API keys cannot be read; those that were read last stay good", error=failure)
        self._failure = failure


def _table_of(document: str | bytes | None) -> KeyTable:
    return KeyTable() if document is None else read_table(document, f"The hash {REDIS_KEY} in Redis")


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"The API keys in Redis cannot be reached: {error}.")
