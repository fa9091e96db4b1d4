"""Who sends a request: tenants and their cache salts.

Owns how a request shows its key, and the secret behind the salts. It must not know requests or where keys are kept.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.config import ConfigError
from libs.errors import StoreUnavailable, Unauthenticated
from services.gateway.api_keys import KeyIndex, KeyTable
from services.gateway.tenant_limits import NO_LIMITS, TenantLimits

DEFAULT_TENANT_ID: Final = "default"
_MIN_SECRET_CHARACTERS: Final = 16
_NOT_READ_RETRY_SECONDS: Final = 1.0
_SECRET_FILE: Final = "cache_salt_secret"


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request runs."""

    tenant_id: str
    # Keeps the tenant's prefixes apart from all others' in every cache.
    cache_salt: bytes
    # Names of the models that the tenant may use; None for all.
    allowed_models: frozenset[str] | None = None
    limits: TenantLimits = NO_LIMITS


class Authenticator:
    """Maps the headers of a request to a tenant, by the table of keys that it was given last."""

    def __init__(self, salt_secret: bytes, *, is_open: bool) -> None:
        """Make one that lets everyone in as the default tenant if it is open, and else nobody before ``use``."""
        self._salt_secret = salt_secret
        self._open_tenant = Tenant(DEFAULT_TENANT_ID, self._salt(DEFAULT_TENANT_ID)) if is_open else None
        self._index: KeyIndex | None = None
        self._tenants: Mapping[str, Tenant] = {}

    def use(self, table: KeyTable) -> None:
        """Take these keys from now on and no others."""
        tenant_ids = {key.tenant_id for key in table.keys}
        self._tenants = {
            tenant_id: Tenant(
                tenant_id, self._salt(tenant_id), table.models_of(tenant_id), table.limits_of(tenant_id)
            )
            for tenant_id in tenant_ids
        }
        self._index = KeyIndex(table)

    def authenticate(self, authorization: str | None, api_key: str | None = None) -> Tenant:
        """Return the tenant of a request, by its header Authorization or X-Api-Key.

        Raises:
            Unauthenticated: keys are configured and the headers hold none of them.
            StoreUnavailable: keys are configured and could not be read yet.
        """
        if self._open_tenant is not None:
            return self._open_tenant
        presented = _presented_key(authorization, api_key)
        if self._index is None:
            raise StoreUnavailable(
                "The API keys could not be read yet.", retry_after_seconds=_NOT_READ_RETRY_SECONDS
            )
        found = self._index.find(presented)
        if found is None:
            raise Unauthenticated("The API key is not known to this server.")
        return self._tenants[found.tenant_id]

    def _salt(self, tenant_id: str) -> bytes:
        return hmac.digest(self._salt_secret, tenant_id.encode(), "sha256")


def _presented_key(authorization: str | None, api_key: str | None) -> str:
    scheme, _, bearer = (authorization or "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    key = key or (api_key or "").strip()
    if not key:
        raise Unauthenticated(
            "You did not provide an API key. Send it as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'."
        )
    return key


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
