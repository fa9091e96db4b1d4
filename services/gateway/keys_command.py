"""The command ``octavo keys``: makes, lists and revokes API keys. Owns its flags and what it prints."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from libs.config import ConfigError, load
from libs.errors import StoreUnavailable
from services.gateway.api_keys import MAX_KEY_CHARACTERS, KeyTable, new_api_key, new_secret
from services.gateway.config import GatewayConfig
from services.gateway.key_stores import KeyFile, KeysInRedis, KeyStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


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
    add = commands.add_parser("add", parents=[place], help="make a key and print it, once", allow_abbrev=False)
    add.add_argument("--tenant", required=True, help="whose key it is")
    add.add_argument(
        "--models",
        help="names of the models that the tenant may use with any of its keys, comma-separated; '*' for all",
    )
    add.add_argument(
        "--key-stdin", action="store_true", help="read the key from standard input instead of making one"
    )
    commands.add_parser("list", parents=[place], help="show all keys but their secrets", allow_abbrev=False)
    revoke = commands.add_parser("revoke", parents=[place], help="make a key void", allow_abbrev=False)
    revoke.add_argument("key_id", help="the key's id, as `octavo keys list` shows it")
    return parser


async def _run(arguments: argparse.Namespace) -> None:
    async with _open_store(arguments) as store:
        match arguments.command:
            case "add":
                await _add(store, arguments)
            case "revoke":
                await store.change(lambda table: table.without_key(arguments.key_id))
                print(f"{arguments.key_id} is revoked.")
            case _:
                _print_table(await store.read())


async def _add(store: KeyStore, arguments: argparse.Namespace) -> None:
    secret = _read_secret() if arguments.key_stdin else new_secret()
    key = new_api_key(secret, arguments.tenant, int(time.time()))
    models = None if arguments.models is None else [name.strip() for name in arguments.models.split(",")]
    if models is not None and not all(models):
        raise ConfigError("--models takes names of models with commas between them, or '*' for all.")
    await store.change(lambda table: table.with_key(key, models))
    print(f"{key.key_id} of tenant {key.tenant_id}", file=sys.stderr)
    if not arguments.key_stdin:
        print("Keep this key; it is not shown again:", file=sys.stderr)
        print(secret)


def _read_secret() -> str:
    return sys.stdin.readline(MAX_KEY_CHARACTERS + 2).rstrip("\r\n")


def _print_table(table: KeyTable) -> None:
    print(f"{'KEY':<20}{'TENANT':<24}{'CREATED':<22}MODELS")
    for key in table.keys:
        models = table.models_of(key.tenant_id)
        created = datetime.fromtimestamp(key.created_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        shown = "all" if models is None else ",".join(sorted(models)) or "none"
        print(f"{key.key_id:<20}{key.tenant_id:<24}{created:<22}{shown}")


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
