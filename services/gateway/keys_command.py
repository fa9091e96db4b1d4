"""The command ``octavo keys``: makes, lists and revokes API keys, and changes what their tenants may use.

Owns its flags and what it prints.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from libs.config import ConfigError, load
from libs.errors import StoreUnavailable
from services.gateway.api_keys import MAX_KEY_CHARACTERS, KeyTable, checked_limit, new_api_key, new_secret
from services.gateway.config import GatewayConfig
from services.gateway.key_stores import KeyFile, KeysInRedis, KeyStore
from services.gateway.tenant_limits import Limit, TenantLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_NO_LIMIT: Final = "none"
_LIMIT_HELP: Final = {
    Limit.PARALLEL_REQUESTS: "requests of the tenant at once",
    Limit.REQUESTS_PER_MINUTE: "requests of the tenant a minute",
    Limit.TOKENS_PER_MINUTE: "tokens of the tenant a minute, prompts and answers together",
    Limit.TOKENS_PER_MONTH: "tokens of the tenant a calendar month (UTC), prompts and answers together",
}
# What `octavo keys list` calls them.
_SHORT_NAMES: Final = {
    Limit.PARALLEL_REQUESTS: "parallel",
    Limit.REQUESTS_PER_MINUTE: "requests/min",
    Limit.TOKENS_PER_MINUTE: "tokens/min",
    Limit.TOKENS_PER_MONTH: "tokens/month",
}


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: what was asked cannot be done.
    """
    arguments = _parser().parse_args(list(argv))
    try:
        asyncio.run(_run(arguments))
    except StoreUnavailable as error:
        raise ConfigError(error.message) from error


def _parser() -> argparse.ArgumentParser:
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--file", help="the table of keys; else gateway.api_keys_file of the configuration")
    place.add_argument("--redis-url", help="Redis that holds the table; else gateway.redis_url")
    place.add_argument("--config", help="TOML file with a table [gateway]")
    parser = argparse.ArgumentParser(prog="octavo keys", description="API keys of gateways.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    tenant = _tenant_flags()
    add = commands.add_parser(
        "add", parents=[place, tenant], help="make a key and print it, once", allow_abbrev=False
    )
    add.add_argument(
        "--key-stdin", action="store_true", help="read the key from standard input instead of making one"
    )
    commands.add_parser(
        "limit", parents=[place, tenant], help="change what a tenant with keys may use", allow_abbrev=False
    )
    commands.add_parser("list", parents=[place], help="show all keys but their secrets", allow_abbrev=False)
    revoke = commands.add_parser("revoke", parents=[place], help="make a key void", allow_abbrev=False)
    revoke.add_argument("key_id", help="the key's id, as `octavo keys list` shows it")
    return parser


def _tenant_flags() -> argparse.ArgumentParser:
    """Return the flags that say what a tenant may use, from now on and with any of its keys."""
    tenant = argparse.ArgumentParser(add_help=False)
    tenant.add_argument("--tenant", required=True, help="whose keys they are")
    tenant.add_argument(
        "--models",
        help="names of the models that the tenant may use with any of its keys, comma-separated; '*' for all",
    )
    for limit, meaning in _LIMIT_HELP.items():
        flag = f"--{limit.value.replace('_', '-')}"
        tenant.add_argument(flag, dest=limit.value, metavar="N", help=f"most {meaning}; '{_NO_LIMIT}' for no limit")
    return tenant


async def _run(arguments: argparse.Namespace) -> None:
    async with _open_store(arguments) as store:
        match arguments.command:
            case "add":
                await _add(store, arguments)
            case "limit":
                await _limit(store, arguments)
            case "revoke":
                await store.change(lambda table: table.without_key(arguments.key_id))
                print(f"{arguments.key_id} is revoked.")
            case _:
                _print_table(await store.read())


async def _add(store: KeyStore, arguments: argparse.Namespace) -> None:
    secret = _read_secret() if arguments.key_stdin else new_secret()
    key = new_api_key(secret, arguments.tenant, int(time.time()))
    models, limits = _models_in(arguments), _limits_in(arguments)
    await store.change(lambda table: table.with_key(key, models).with_limits(key.tenant_id, limits))
    print(f"{key.key_id} of tenant {key.tenant_id}", file=sys.stderr)
    if not arguments.key_stdin:
        print("Keep this key; it is not shown again:", file=sys.stderr)
        print(secret)


async def _limit(store: KeyStore, arguments: argparse.Namespace) -> None:
    tenant_id, models, limits = arguments.tenant, _models_in(arguments), _limits_in(arguments)
    if models is None and not limits:
        raise ConfigError("Say what to change: --models, or a limit that `octavo keys limit --help` shows.")

    def change(table: KeyTable) -> KeyTable:
        table.check_tenant(tenant_id)
        changed = table if models is None else table.with_models(tenant_id, models)
        return changed.with_limits(tenant_id, limits)

    await store.change(change)
    print(f"The limits of tenant {tenant_id} are changed.")


def _models_in(arguments: argparse.Namespace) -> list[str] | None:
    models = None if arguments.models is None else [name.strip() for name in arguments.models.split(",")]
    if models is not None and not all(models):
        raise ConfigError("--models takes names of models with commas between them, or '*' for all.")
    return models


def _limits_in(arguments: argparse.Namespace) -> dict[Limit, int | None]:
    """Return the limits that are given; None for those that are taken away."""
    given = {limit: getattr(arguments, limit.value) for limit in Limit}
    return {limit: _limit_value(limit, text) for limit, text in given.items() if text is not None}


def _limit_value(limit: Limit, text: str) -> int | None:
    if text == _NO_LIMIT:
        return None
    # Nothing else that int() takes, such as "1_000" or digits of other scripts; a wrong one is as 0 is.
    return checked_limit(limit, int(text) if text.isascii() and text.isdigit() else 0)


def _read_secret() -> str:
    return sys.stdin.readline(MAX_KEY_CHARACTERS + 2).rstrip("\r\n")


def _print_table(table: KeyTable) -> None:
    limits = {key.tenant_id: _shown_limits(table.limits_of(key.tenant_id)) for key in table.keys}
    width = max(map(len, ("LIMITS", *limits.values()))) + 2
    print(f"{'KEY':<20}{'TENANT':<24}{'CREATED':<22}{'LIMITS':<{width}}MODELS")
    for key in table.keys:
        models = table.models_of(key.tenant_id)
        created = datetime.fromtimestamp(key.created_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        shown = "all" if models is None else ",".join(sorted(models)) or "none"
        print(f"{key.key_id:<20}{key.tenant_id:<24}{created:<22}{limits[key.tenant_id]:<{width}}{shown}")


def _shown_limits(limits: TenantLimits) -> str:
    return ",".join(f"{_SHORT_NAMES[limit]}={value}" for limit, value in limits.by_limit.items()) or "none"


@asynccontextmanager
async def _open_store(arguments: argparse.Namespace) -> AsyncIterator[KeyStore]:
    file, redis_url = arguments.file, arguments.redis_url
    if file is not None and redis_url is not None:
        raise ConfigError("Give either --file or --redis-url.")
    if file is None and redis_url is None:
        flags = [] if arguments.config is None else ["--config", arguments.config]
        config = load(GatewayConfig, tier="gateway", argv=flags)
        file, redis_url = config.api_keys_file, config.redis_url if config.api_keys_in_redis else None
    if file is not None:
        yield KeyFile(Path(file))
    elif redis_url is not None:
        from libs.registry import make_redis

        redis = make_redis(redis_url)
        try:
            yield KeysInRedis(redis)
        finally:
            await redis.aclose()
    else:
        raise ConfigError(
            "Say where the keys are: --file FILE, --redis-url URL, or gateway.api_keys_file in the configuration."
        )
