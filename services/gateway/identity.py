"""Who sends a request: API keys, tenants and their cache salts.

Owns the keys file, the comparison of keys and the secret behind the salts. It must not know requests.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.config import ConfigError
from libs.errors import Unauthenticated

DEFAULT_TENANT_ID: Final = "default"
_TENANT_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_SECRET_CHARACTERS: Final = 16
_MAX_KEY_CHARACTERS: Final = 512
_SECRET_FILE: Final = "cache_salt_secret"


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request runs."""

    tenant_id: str
    # Keeps the tenant's prefixes apart from all others' in every cache.
    cache_salt: bytes


class Authenticator:
    """Maps an Authorization header to a tenant; without keys everyone is the default tenant."""

    def __init__(self, tenant_ids_by_key_digest: Mapping[bytes, str] | None, salt_secret: bytes) -> None:
        self._salt_secret = salt_secret
        self._tenants = {
            digest: self._tenant(tenant_id) for digest, tenant_id in (tenant_ids_by_key_digest or {}).items()
        }
        self._open_tenant = self._tenant(DEFAULT_TENANT_ID) if tenant_ids_by_key_digest is None else None

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the tenant of a request.

        Raises:
            Unauthenticated: keys are configured and the header holds none of them.
        """
        if self._open_tenant is not None:
            return self._open_tenant
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("You did not provide an API key. Send it as 'Authorization: Bearer KEY'.")
        presented = _digest(key)
        # The table is searched by digest, so its timing tells nothing of keys; the comparison is constant in time.
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, presented):
                return tenant
        raise Unauthenticated("The API key is not known to this server.")

    def _tenant(self, tenant_id: str) -> Tenant:
        return Tenant(tenant_id, hmac.digest(self._salt_secret, tenant_id.encode(), "sha256"))


def read_api_keys(path: Path) -> dict[bytes, str]:
    """Read lines ``key:tenant``; empty lines and those that begin with # are left out. Keys are kept as digests.

    Raises:
        ConfigError: a line that cannot be used; it is named by its number, never shown.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API keys file {path} cannot be read: {error}.") from error
    tenant_ids: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, _, tenant_id = line.rpartition(":")
        key, tenant_id = key.strip(), tenant_id.strip()
        if not key or len(key) > _MAX_KEY_CHARACTERS or _TENANT_ID.fullmatch(tenant_id) is None:
            raise ConfigError(
                f"Line {number} of {path} is not key:tenant; a tenant is up to 64 letters, digits, dots, dashes "
                "and underscores."
            )
        if _digest(key) in tenant_ids:
            raise ConfigError(f"Line {number} of {path} repeats a key.")
        tenant_ids[_digest(key)] = tenant_id
    if not tenant_ids:
        raise ConfigError(f"The API keys file {path} holds no key.")
    return tenant_ids


def cache_salt_secret(configured: str | None, data_dir: Path) -> bytes:
    """Return the secret of the cache salts: the configured one, or one made once in ``data_dir``.

    Raises:
        ConfigError: the secret is too short or its file cannot be used.
    """
    if configured is not None:
        if len(configured) < _MIN_SECRET_CHARACTERS:
            raise ConfigError(f"cache_salt_secret must have at least {_MIN_SECRET_CHARACTERS} characters.")
        return configured.encode()
    path = data_dir / _SECRET_FILE
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_once(path, secrets.token_hex(32))
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The secret in {path} cannot be read: {error}.") from error
    if len(secret) < _MIN_SECRET_CHARACTERS:
        raise ConfigError(f"The secret in {path} is too short; remove the file to have a new one made.")
    return secret.encode()


def _write_once(path: Path, text: str) -> None:
    """Write a file whole or not at all; of several processes that try at once one wins and all read the same."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
