"""Tenants, how they show their keys, and salts."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libs.config import ConfigError
from libs.errors import StoreUnavailable, Unauthenticated
from services.gateway.api_keys import ApiKey, KeyTable, digest_of
from services.gateway.identity import Authenticator, cache_salt_secret
from services.gateway.tenant_limits import TenantLimits

SECRET = b"a secret of some length"


TABLE = KeyTable(
    tuple(
        ApiKey(f"key_{secret}", digest_of(secret), tenant_id, 0)
        for secret, tenant_id in [("sk-one", "acme"), ("sk:with:colons", "acme"), ("sk-two", "globex")]
    ),
    {"globex": frozenset({"small"})},
    {"globex": TenantLimits(max_parallel_requests=1)},
)


def authenticator_of(salt_secret: bytes = SECRET) -> Authenticator:
    authenticator = Authenticator(salt_secret, is_open=False)
    authenticator.use(TABLE)
    return authenticator


@pytest.fixture
def authenticator() -> Authenticator:
    return authenticator_of()


def test_a_key_names_its_tenant(authenticator: Authenticator) -> None:
    assert authenticator.authenticate("Bearer sk-one").tenant_id == "acme"
    assert authenticator.authenticate("bearer  sk:with:colons").tenant_id == "acme"
    assert authenticator.authenticate("Bearer sk-two").tenant_id == "globex"
    assert authenticator.authenticate(None, "sk-two").tenant_id == "globex"
    assert authenticator.authenticate("Basic x", " sk-two ").tenant_id == "globex"


def test_a_tenant_has_its_limits(authenticator: Authenticator) -> None:
    assert not authenticator.authenticate("Bearer sk-one").limits.is_limited
    assert authenticator.authenticate("Bearer sk-two").limits.max_parallel_requests == 1


def test_a_tenant_has_its_list_of_models(authenticator: Authenticator) -> None:
    assert authenticator.authenticate("Bearer sk-one").allowed_models is None
    assert authenticator.authenticate("Bearer sk-two").allowed_models == frozenset({"small"})


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-one", "sk-one", "Bearer sk-on", "Bearer \udcff"]
)
def test_anything_else_is_refused_without_showing_it(authenticator: Authenticator, header: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        authenticator.authenticate(header)

    assert "sk-on" not in caught.value.message


def test_a_key_is_good_until_the_table_without_it_is_used(authenticator: Authenticator) -> None:
    authenticator.use(TABLE.without_key("key_sk-one"))

    assert authenticator.authenticate("Bearer sk-two").tenant_id == "globex"
    with pytest.raises(Unauthenticated):
        authenticator.authenticate("Bearer sk-one")


def test_an_empty_table_lets_nobody_in(authenticator: Authenticator) -> None:
    authenticator.use(KeyTable())

    with pytest.raises(Unauthenticated):
        authenticator.authenticate("Bearer sk-one")


def test_before_the_keys_are_read_nobody_is_let_in() -> None:
    authenticator = Authenticator(SECRET, is_open=False)

    with pytest.raises(StoreUnavailable):
        authenticator.authenticate("Bearer sk-one")


def test_without_keys_everyone_is_the_default_tenant() -> None:
    assert Authenticator(SECRET, is_open=True).authenticate(None).tenant_id == "default"


def test_salts_differ_by_tenant_and_secret_and_are_stable(authenticator: Authenticator) -> None:
    one = authenticator.authenticate("Bearer sk-one").cache_salt
    two = authenticator.authenticate("Bearer sk-two").cache_salt
    again = authenticator_of().authenticate("Bearer sk-one").cache_salt
    other = authenticator_of(b"another secret ...").authenticate("Bearer sk-one")

    assert len({one, two, other.cache_salt}) == 3
    assert one == again
    assert len(one) == 32


def test_the_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        secrets = list(threads.map(lambda _: cache_salt_secret(None, tmp_path / "data"), range(8)))

    assert len(set(secrets)) == 1
    path = tmp_path / "data" / "cache_salt_secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["cache_salt_secret"]


def test_a_configured_secret_wins_and_must_be_long(tmp_path: Path) -> None:
    assert cache_salt_secret("x" * 16, tmp_path) == b"x" * 16
    with pytest.raises(ConfigError):
        cache_salt_secret("short", tmp_path)


def test_a_broken_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache_salt_secret").write_text("x")

    with pytest.raises(ConfigError):
        cache_salt_secret(None, tmp_path)
