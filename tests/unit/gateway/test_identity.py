"""API keys, tenants and salts."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libs.config import ConfigError
from libs.errors import Unauthenticated
from services.gateway.identity import Authenticator, cache_salt_secret, read_api_keys

SECRET = b"a secret of some length"


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    text = "# keys\n\nsk-one:acme\nsk:with:colons:acme\nsk-two:globex\n"
    return Authenticator(read_api_keys(keys_file(tmp_path, text)), SECRET)


def test_a_key_names_its_tenant(authenticator: Authenticator) -> None:
    assert authenticator.authenticate("Bearer sk-one").tenant_id == "acme"
    assert authenticator.authenticate("bearer  sk:with:colons").tenant_id == "acme"
    assert authenticator.authenticate("Bearer sk-two").tenant_id == "globex"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-one", "sk-one", "Bearer sk-on", "Bearer \udcff"]
)
def test_anything_else_is_refused_without_showing_it(authenticator: Authenticator, header: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        authenticator.authenticate(header)

    assert "sk-on" not in caught.value.message


def test_without_keys_everyone_is_the_default_tenant() -> None:
    assert Authenticator(None, SECRET).authenticate(None).tenant_id == "default"


def test_salts_differ_by_tenant_and_secret_and_are_stable(authenticator: Authenticator, tmp_path: Path) -> None:
    one = authenticator.authenticate("Bearer sk-one").cache_salt
    two = authenticator.authenticate("Bearer sk-two").cache_salt
    again = Authenticator(read_api_keys(tmp_path / "keys"), SECRET).authenticate("Bearer sk-one").cache_salt
    other = Authenticator(read_api_keys(tmp_path / "keys"), b"another secret ...").authenticate("Bearer sk-one")

    assert len({one, two, other.cache_salt}) == 3
    assert one == again
    assert len(one) == 32


@pytest.mark.parametrize(
    "text", ["", "# none\n", "no-colon\n", ":acme\n", "key:\n", "key:a b\n", "key:acme\nkey:globex\n"]
)
def test_a_keys_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read_api_keys(keys_file(tmp_path, text))


def test_a_missing_keys_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_api_keys(tmp_path / "nothing")


def test_a_bad_line_is_named_by_number_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_api_keys(keys_file(tmp_path, "sk-good:acme\nsk-secret-without-tenant\n"))

    assert "Line 2" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


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
