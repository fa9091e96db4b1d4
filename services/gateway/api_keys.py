"""The table of API keys: whose they are, which models their tenants may use, and how much.

Owns the table, its document and how a key is made and recognized. It must not know where the document is kept.

Of a key only its SHA-256 is kept. A slow hash, as for passwords, would protect what can be guessed: our keys are 32
random bytes, and own keys must be long, so that trying all of them is out of reach at any speed, and a slow hash
would only be a cost for each request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec

from libs.config import ConfigError
from services.gateway.tenant_limits import MAX_BY_LIMIT, NO_LIMITS, Limit, TenantLimits

MAX_KEYS: Final = 100_000
MAX_MODELS_OF_TENANT: Final = 1024
MIN_OWN_KEY_CHARACTERS: Final = 32
MAX_KEY_CHARACTERS: Final = 512
# In a list of models: every model, also those to come.
ALL_MODELS: Final = "*"

_FORMAT: Final = "octavo-api-keys-1"
_KEY_PREFIX: Final = "octavo_"
_SECRET_BYTES: Final = 32
_KEY_ID_BYTES: Final = 6
# Enough to find a key's row; the whole digest is then compared in constant time.
_BUCKET_BYTES: Final = 8
_TENANT_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_OWN_KEY: Final = re.compile(r"[\x21-\x7e]+")
_OLD_LINE: Final = re.compile(r"^\s*[^\s{#].*:\s*[A-Za-z0-9][A-Za-z0-9._-]*\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it is kept."""

    key_id: str
    digest: bytes
    tenant_id: str
    # Seconds since 1970.
    created_time: int


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys; the names of models for tenants that may not use every one, and limits for those that have some."""

    keys: tuple[ApiKey, ...] = ()
    models_by_tenant: Mapping[str, frozenset[str]] = field(default_factory=dict)
    limits_by_tenant: Mapping[str, TenantLimits] = field(default_factory=dict)

    def with_key(self, key: ApiKey, models: Sequence[str] | None) -> KeyTable:
        """Return the table with one more key; ``models``, where given, is the tenant's list from now on.

        Raises:
            ConfigError: the key is in the table already, or the table is full.
        """
        if any(hmac.compare_digest(known.digest, key.digest) for known in self.keys):
            raise ConfigError("This key is in the table already.")
        if len(self.keys) >= MAX_KEYS:
            raise ConfigError(f"The table holds {MAX_KEYS} keys, which is the most; revoke some first.")
        table = replace(self, keys=(*self.keys, key))
        return table if models is None else table.with_models(key.tenant_id, models)

    def with_models(self, tenant_id: str, models: Sequence[str]) -> KeyTable:
        """Return the table with another list of models for a tenant; ``*`` in it stands for all."""
        others = {tenant: names for tenant, names in self.models_by_tenant.items() if tenant != tenant_id}
        own = {} if ALL_MODELS in models else {tenant_id: frozenset(models)}
        return replace(self, models_by_tenant=others | own)

    def with_limits(self, tenant_id: str, changes: Mapping[Limit, int | None]) -> KeyTable:
        """Return the table with these limits of a tenant changed; None takes one away."""
        others = {tenant: limits for tenant, limits in self.limits_by_tenant.items() if tenant != tenant_id}
        limits = self.limits_of(tenant_id).changed(changes)
        own = {tenant_id: limits} if limits.is_limited else {}
        return replace(self, limits_by_tenant=others | own)

    def without_key(self, key_id: str) -> KeyTable:
        """Return the table without a key. What is said of its tenant stays, for the keys that it may get later.

        Raises:
            ConfigError: there is no such key.
        """
        rest = tuple(key for key in self.keys if key.key_id != key_id)
        if len(rest) == len(self.keys):
            raise ConfigError(f"There is no key {key_id!r}; `octavo keys list` shows all.")
        return replace(self, keys=rest)

    def models_of(self, tenant_id: str) -> frozenset[str] | None:
        """Return the names of the models that a tenant may use; None for all."""
        return self.models_by_tenant.get(tenant_id)

    def limits_of(self, tenant_id: str) -> TenantLimits:
        """Return a tenant's limits."""
        return self.limits_by_tenant.get(tenant_id, NO_LIMITS)

    def check_tenant(self, tenant_id: str) -> None:
        """Refuse a tenant without a key, which is as a rule a name with a slip in it; raises ConfigError."""
        if not any(key.tenant_id == tenant_id for key in self.keys):
            raise ConfigError(f"The tenant {tenant_id!r} has no key; `octavo keys list` shows who has.")


class KeyIndex:
    """Finds the row of a presented key."""

    def __init__(self, table: KeyTable) -> None:
        self._buckets: defaultdict[bytes, list[ApiKey]] = defaultdict(list)
        for key in table.keys:
            self._buckets[key.digest[:_BUCKET_BYTES]].append(key)

    def find(self, presented: str) -> ApiKey | None:
        """Return the row of a key, or None for one that is not in the table.

        How long the search takes tells something of a digest at most, of which nobody can choose the bytes; the
        comparison of whole digests takes the same time wherever they differ.
        """
        digest = digest_of(presented)
        for key in self._buckets.get(digest[:_BUCKET_BYTES], ()):
            if hmac.compare_digest(key.digest, digest):
                return key
        return None


def new_secret() -> str:
    """Return a new key for a client, from the system's random numbers."""
    return _KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def new_api_key(secret: str, tenant_id: str, created_time: int) -> ApiKey:
    """Return the row of a key.

    Raises:
        ConfigError: a tenant or a key that cannot be served; the key is not shown.
    """
    if re.fullmatch(_TENANT_ID, tenant_id) is None:
        raise ConfigError("A tenant is up to 64 letters, digits, dots, dashes and underscores.")
    if not MIN_OWN_KEY_CHARACTERS <= len(secret) <= MAX_KEY_CHARACTERS or _OWN_KEY.fullmatch(secret) is None:
        raise ConfigError(
            f"A key has {MIN_OWN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} visible ASCII characters without spaces."
        )
    return ApiKey(f"key_{secrets.token_hex(_KEY_ID_BYTES)}", digest_of(secret), tenant_id, created_time)


def digest_of(secret: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


# --- The document.


class _KeyRow(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    key_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant_id: Annotated[str, msgspec.Meta(pattern=_TENANT_ID)]
    created_time: int


_LimitValue = Annotated[int, msgspec.Meta(ge=1)]


class _LimitsRow(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    max_parallel_requests: _LimitValue | None = None
    requests_per_minute: _LimitValue | None = None
    tokens_per_minute: _LimitValue | None = None
    tokens_per_month: _LimitValue | None = None


# An Octavo from before there were limits refuses a row that has them, and one without models: what it would not
# enforce it does not read. So the format is the same.
class _TenantRow(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    models: Annotated[list[str], msgspec.Meta(max_length=MAX_MODELS_OF_TENANT)] | None = None
    limits: _LimitsRow | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    format: str
    keys: Annotated[list[_KeyRow], msgspec.Meta(max_length=MAX_KEYS)]
    tenants: dict[str, _TenantRow]


def write_table(table: KeyTable) -> bytes:
    """Return the document of a table: JSON that a person can read."""
    tenants = table.models_by_tenant.keys() | table.limits_by_tenant.keys()
    document = _Document(
        format=_FORMAT,
        keys=[_KeyRow(key.key_id, key.digest.hex(), key.tenant_id, key.created_time) for key in table.keys],
        tenants={tenant: _row_of(table, tenant) for tenant in sorted(tenants)},
    )
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def read_table(document: bytes | str, where: str) -> KeyTable:
    """Return the table of a document; ``where`` names the place in errors, which show nothing of the content.

    Raises:
        ConfigError: it is no such document.
    """
    try:
        found = msgspec.json.decode(document, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _OLD_LINE.search(document if isinstance(document, str) else document.decode(errors="replace")):
            raise ConfigError(
                f"{where} has lines key:tenant, which are not read any more because they hold the keys themselves. "
                "Make a new table with `octavo keys add --tenant TENANT --file NEW_FILE`, once for each key; with "
                "--key-stdin it takes over a key of at least 32 characters from its standard input."
            ) from error
        raise ConfigError(f"{where} is not a table of `octavo keys`: {error}.") from error
    if found.format != _FORMAT:
        raise ConfigError(f"{where} has another format than {_FORMAT!r}; use the Octavo that wrote it.")
    if len({row.key_id for row in found.keys}) < len(found.keys) or len({row.sha256 for row in found.keys}) < len(
        found.keys
    ):
        raise ConfigError(f"{where} holds a key twice.")
    return KeyTable(
        tuple(ApiKey(row.key_id, bytes.fromhex(row.sha256), row.tenant_id, row.created_time) for row in found.keys),
        {tenant: frozenset(row.models) for tenant, row in found.tenants.items() if row.models is not None},
        {tenant: _limits_of(tenant, row.limits) for tenant, row in found.tenants.items() if row.limits is not None},
    )


def checked_limit(limit: Limit, value: int) -> int:
    """Return the value of a limit; raises ConfigError for one that cannot be kept."""
    if not 1 <= value <= MAX_BY_LIMIT[limit]:
        raise ConfigError(f"{limit} must be between 1 and {MAX_BY_LIMIT[limit]}, or 'none' for no limit.")
    return value


def _row_of(table: KeyTable, tenant_id: str) -> _TenantRow:
    models, limits = table.models_of(tenant_id), table.limits_of(tenant_id)
    return _TenantRow(
        None if models is None else sorted(models),
        _LimitsRow(**{limit.value: value for limit, value in limits.by_limit.items()})
        if limits.is_limited
        else None,
    )


def _limits_of(tenant_id: str, row: _LimitsRow) -> TenantLimits:
    limits = TenantLimits(**msgspec.structs.asdict(row))
    for limit, value in limits.by_limit.items():
        try:
            checked_limit(limit, value)
        except ConfigError as error:
            raise ConfigError(f"The tenant {tenant_id!r}: {error}") from None
    return limits
