"""The table of API keys, its file, and the command that changes it."""

from __future__ import annotations

import io
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from libs.config import ConfigError
from libs.errors import ModelNotFound
from services.gateway.api_keys import (
    ApiKey,
    KeyIndex,
    KeyTable,
    digest_of,
    new_api_key,
    new_secret,
    read_table,
    write_table,
)
from services.gateway.identity import Authenticator, Tenant
from services.gateway.key_stores import KeyFile, KeyWatch
from services.gateway.keys_command import main
from services.gateway.model_access import check_access, names_for
from services.gateway.openai_schema import ModelFacts
from services.gateway.tenant_limits import NO_LIMITS, Limit, TenantLimits

MODEL = ModelFacts("own", 100, ("alias", "other/alias"))


def key_of(secret: str, tenant_id: str = "acme") -> ApiKey:
    return new_api_key(secret, tenant_id, 1_700_000_000)


def test_a_table_survives_its_document() -> None:
    table = KeyTable().with_key(key_of(new_secret()), ["b", "a"]).with_key(key_of(new_secret(), "globex"), None)

    assert read_table(write_table(table), "here") == table


def test_a_document_shows_no_key() -> None:
    secret = new_secret()

    document = write_table(KeyTable().with_key(key_of(secret), None))

    assert secret.encode() not in document
    assert digest_of(secret).hex().encode() in document


def test_keys_that_share_the_beginning_of_a_digest_are_told_apart() -> None:
    secret = new_secret()
    right = key_of(secret)
    wrong = ApiKey("key_wrong", right.digest[:-1] + bytes([right.digest[-1] ^ 1]), "globex", 0)

    assert KeyIndex(KeyTable((wrong, right))).find(secret) is right
    assert KeyIndex(KeyTable((wrong,))).find(secret) is None


@pytest.mark.parametrize(("tenant", "secret"), [("a b", "x" * 32), ("", "x" * 32), ("a", "short"), ("a", "ä" * 32)])
def test_a_key_that_cannot_be_served_is_refused(tenant: str, secret: str) -> None:
    with pytest.raises(ConfigError):
        key_of(secret, tenant)


def test_a_key_is_added_once() -> None:
    table = KeyTable().with_key(key_of("x" * 32), None)

    with pytest.raises(ConfigError):
        table.with_key(key_of("x" * 32, "globex"), None)


def test_the_list_of_models_is_the_tenants_until_it_is_given_anew() -> None:
    table = KeyTable().with_key(key_of("x" * 32), ["own"])

    assert table.with_key(key_of("y" * 32), None).models_of("acme") == frozenset({"own"})
    assert table.with_key(key_of("y" * 32), ["other"]).models_of("acme") == frozenset({"other"})
    assert table.with_key(key_of("y" * 32), ["*"]).models_of("acme") is None


def test_limits_are_the_tenants_until_they_are_changed_one_by_one() -> None:
    table = KeyTable().with_key(key_of("x" * 32), None).with_limits("acme", {Limit.PARALLEL_REQUESTS: 2})

    changed = table.with_limits("acme", {Limit.TOKENS_PER_MONTH: 7, Limit.REQUESTS_PER_MINUTE: 5})
    taken = changed.with_limits("acme", {Limit.PARALLEL_REQUESTS: None})

    assert table.with_key(key_of("y" * 32), None).limits_of("acme") == TenantLimits(max_parallel_requests=2)
    assert changed.limits_of("acme").by_limit == {
        Limit.PARALLEL_REQUESTS: 2,
        Limit.REQUESTS_PER_MINUTE: 5,
        Limit.TOKENS_PER_MONTH: 7,
    }
    assert taken.limits_of("acme") == TenantLimits(requests_per_minute=5, tokens_per_month=7)
    assert taken.limits_of("globex") is NO_LIMITS
    for each in (table, changed, taken, changed.with_models("acme", ["own"])):
        assert read_table(write_table(each), "here") == each


def test_a_table_without_limits_is_written_as_before_there_were_any() -> None:
    table = KeyTable((key_of("x" * 32),), {"acme": frozenset({"own"})})

    document = write_table(table.with_limits("acme", {Limit.TOKENS_PER_MINUTE: 5}))
    tenants = msgspec.json.decode(write_table(table))["tenants"]

    assert tenants == {"acme": {"models": ["own"]}}
    # What an older Octavo would not enforce, it does not read.
    assert msgspec.json.decode(document)["tenants"]["acme"].keys() - {"models"}


@pytest.mark.parametrize(
    "limits", [{"tokens_per_minute": 0}, {"tokens_per_minute": 10**10}, {"tokens_per_year": 1}]
)
def test_limits_that_cannot_be_kept_are_refused(limits: dict[str, int]) -> None:
    document = {"format": "octavo-api-keys-1", "keys": [], "tenants": {"acme": {"limits": limits}}}

    with pytest.raises(ConfigError):
        read_table(msgspec.json.encode(document), "here")


@pytest.mark.parametrize(
    "document", [b"", b"{}", b"[]", b"\xff", b'{"format":"octavo-api-keys-2","keys":[],"tenants":{}}']
)
def test_another_document_is_refused(document: bytes) -> None:
    with pytest.raises(ConfigError):
        read_table(document, "here")


def test_lines_of_keys_and_tenants_are_refused_with_the_way_out_and_without_the_key() -> None:
    with pytest.raises(ConfigError) as caught:
        read_table(b"# keys\nsk-secret:acme\n", "The file")

    assert "octavo keys add" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


# --- Which models.


def tenant_with(*models: str) -> Tenant:
    return Tenant("acme", b"", frozenset(models))


def test_who_may_use_the_models_own_name_may_use_every_alias() -> None:
    assert names_for(Tenant("acme", b""), MODEL) == MODEL.all_names
    assert names_for(tenant_with("own"), MODEL) == MODEL.all_names
    assert names_for(tenant_with("alias", "elsewhere"), MODEL) == ("alias",)
    assert names_for(tenant_with(), MODEL) == ()


def test_a_name_off_the_list_is_no_model() -> None:
    check_access(tenant_with("alias"), MODEL, "alias")
    check_access(tenant_with("alias"), MODEL, None)

    for tenant, name in [(tenant_with("alias"), "own"), (tenant_with(), "own"), (tenant_with(), None)]:
        with pytest.raises(ModelNotFound):
            check_access(tenant, MODEL, name)


# --- The command.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out.strip()


def test_keys_are_added_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "folder" / "keys.json")
    first = run(capsys, "add", "--tenant", "acme", "--models", "own, alias", "--file", file)
    second = run(capsys, "add", "--tenant", "globex", "--file", file)
    lines = run(capsys, "list", "--file", file).splitlines()
    found = KeyIndex(KeyFile(Path(file)).read_now()).find(first)
    assert found is not None
    run(capsys, "revoke", found.key_id, "--file", file)
    index = KeyIndex(KeyFile(Path(file)).read_now())

    assert len(first) > 43
    assert [line.split()[1] for line in lines[1:]] == ["acme", "globex"]
    assert [line.split()[-1] for line in lines[1:]] == ["alias,own", "all"]
    assert not any(secret in "".join(lines) for secret in (first, second))
    assert index.find(first) is None
    assert index.find(second) is not None
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    with pytest.raises(ConfigError):
        main(["revoke", found.key_id, "--file", file])


def test_limits_are_set_with_a_key_or_alone_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.json")
    run(capsys, "add", "--tenant", "acme", "--max-parallel-requests", "2", "--tokens-per-minute=90", "--file", file)
    run(capsys, "add", "--tenant", "globex", "--file", file)
    said = run(
        capsys,
        *("limit", "--tenant", "acme", "--requests-per-minute", "60", "--tokens-per-month", "1000"),
        *("--max-parallel-requests", "none", "--models", "own", "--file", file),
    )
    lines = run(capsys, "list", "--file", file).splitlines()

    assert said == "The limits of tenant acme are changed."
    assert [line.split()[3:] for line in lines] == [
        ["LIMITS", "MODELS"],
        ["requests/min=60,tokens/min=90,tokens/month=1000", "own"],
        ["none", "all"],
    ]
    for wrong in ("0", "-1", "1.5", "", "1e3", "1_0", "٣", "1000000001"):
        with pytest.raises(ConfigError, match="requests_per_minute must be between"):
            main(["limit", "--tenant", "acme", f"--requests-per-minute={wrong}", "--file", file])
    with pytest.raises(ConfigError, match="no key"):
        main(["limit", "--tenant", "acne", "--requests-per-minute", "1", "--file", file])
    with pytest.raises(ConfigError, match="what to change"):
        main(["limit", "--tenant", "acme", "--file", file])


def test_an_own_key_comes_from_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, secret = tmp_path / "keys.json", "k" * 40
    monkeypatch.setattr("sys.stdin", io.StringIO(secret + "\n"))

    printed = run(capsys, "add", "--tenant", "acme", "--key-stdin", "--file", str(file))

    assert printed == ""
    assert KeyIndex(KeyFile(file).read_now()).find(secret) is not None


def test_keys_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: main(["add", "--tenant", "acme", "--file", str(file)]), range(16)))

    assert len(KeyFile(file).read_now().keys) == 16


def test_the_place_comes_from_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "octavo.toml"
    config.write_text(f'[gateway]\nhost = "0.0.0.0"\napi_keys_file = "{tmp_path / "keys.json"}"\n')

    run(capsys, "add", "--tenant", "acme", "--config", str(config))

    assert len(KeyFile(tmp_path / "keys.json").read_now().keys) == 1


# --- While a gateway runs.


async def test_a_watch_takes_over_what_changes_and_keeps_what_it_has_when_it_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, other = key_of("x" * 32), key_of("y" * 32, "globex")
    store, authenticator = KeyFile(file), Authenticator(b"secret", is_open=False)
    watch = KeyWatch(store, authenticator, poll_seconds=1.0)
    await store.change(lambda table: table.with_key(key, None))
    await watch.refresh()

    file.write_text("not a table")
    with pytest.raises(ConfigError):
        await watch.refresh()
    assert authenticator.authenticate("Bearer " + "x" * 32).tenant_id == "acme"

    file.write_bytes(write_table(KeyTable((other,))))
    await watch.refresh()
    assert authenticator.authenticate("Bearer " + "y" * 32).tenant_id == "globex"
    with pytest.raises(Exception, match="not known"):
        authenticator.authenticate("Bearer " + "x" * 32)
