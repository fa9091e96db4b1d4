"""A real gateway process between fakes of the other tiers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from libs.text import ModelText, load_model_text, resolve_model_path
from services.gateway.api_keys import ApiKey, KeyTable, digest_of, write_table
from tests.fakes.fake_generation_engine import FakeGenerationEngine, Script
from tests.fakes.fake_router import FakeRouter
from tests.fakes.fake_telemetry import FakeTelemetry

MODEL_NAME = "smollm2-135m-instruct"
# Beside other work a group of gateways has taken more than half a minute.
START_SECONDS = 90.0
_REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(slots=True)
class Gateway:
    """A running gateway and a client session for it."""

    process: asyncio.subprocess.Process
    base_url: str
    http: aiohttp.ClientSession
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def grpc_address(self) -> str:
        """Where it listens for gRPC."""
        return str(next(event["grpc_address"] for event in self.log if event["event"] == "gateway listens"))

    async def wait_ready(self) -> None:
        """Wait until /readyz says so."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                async with self.http.get("/readyz") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.02)

    async def metric(self, name: str, **labels: str) -> float:
        """Read one sample of /metrics; 0 when there is none."""
        wanted = name + (
            "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
        )
        async with self.http.get("/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(wanted + " "):
                    return float(line.rpartition(" ")[2])
        return 0.0

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    async def wait_exit(self) -> int:
        """Wait for the end of the process; returns its exit code."""
        async with asyncio.timeout(START_SECONDS):
            return await self.process.wait()


@dataclass(slots=True)
class Stand:
    """A gateway and the fakes around it."""

    engine: FakeGenerationEngine
    router: FakeRouter
    telemetry: FakeTelemetry
    model_text: ModelText
    gateway: Gateway

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        return self.model_text.tokenizer.encode(text, allow_special=False)

    async def until_all_is_taken(self) -> None:
        """Return when the gateway has taken what the engine has sent: another answer came the same way after."""
        self.engine.scripts.appendleft(Script(token_ids=self.encode("x")))
        body = {"model": MODEL_NAME, "prompt": "x"}
        async with self.gateway.http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()


class open_stand:  # Reads as the context manager that it is.
    """Start the fakes, and a gateway between them."""

    def __init__(
        self, data_dir: Path, *flags: str, with_router: bool = True, model_path: Path | None = None
    ) -> None:
        self._data_dir, self._flags, self._with_router = data_dir, flags, with_router
        self._model_path = resolve_model_path(MODEL_NAME) if model_path is None else model_path
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Stand:
        try:
            return await self._start()
        except BaseException:
            # Servers that nobody stops keep this process from ending.
            await self._stack.aclose()
            raise

    async def _start(self) -> Stand:
        model_text = load_model_text(self._model_path)
        engine = FakeGenerationEngine(tokenizer_digest=model_text.tokenizer_digest)
        router, telemetry = FakeRouter([engine]), FakeTelemetry()
        for fake in (engine, router, telemetry):
            await fake.start()
            self._stack.push_async_callback(fake.stop)
        engines = (
            ["--router-address", router.address] if self._with_router else ["--engine-addresses", engine.address]
        )
        gateway = await self._stack.enter_async_context(
            run_gateway(
                self._data_dir,
                *("--telemetry-address", telemetry.address, *engines),
                *("--model", str(self._model_path), "--served-model-name", MODEL_NAME, *self._flags),
            )
        )
        await gateway.wait_ready()
        return Stand(engine, router, telemetry, model_text, gateway)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


def write_keys(path: Path, tenants_by_secret: Mapping[str, str], **models: list[str]) -> Path:
    """Write a table of API keys with these secrets, which may be shorter than `octavo keys` takes."""
    keys = tuple(
        ApiKey(f"key_{index}", digest_of(secret), tenant, 0)
        for index, (secret, tenant) in enumerate(tenants_by_secret.items())
    )
    table = KeyTable(keys, {tenant: frozenset(names) for tenant, names in models.items()})
    path.write_bytes(write_table(table))
    return path


def events_of(raw: bytes) -> list[Any]:
    """Parse a stream strictly: every event is one data line of JSON or [DONE], or a comment."""
    assert raw.endswith(b"\n\n")
    events: list[Any] = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block == ": ping":
            continue
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@asynccontextmanager
async def run_gateway(data_dir: Path, *flags: str) -> AsyncIterator[Gateway]:
    """Start ``octavo gateway`` on a free port and wait until it listens; kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.cli", "gateway", "--port", "0", "--data-dir", str(data_dir), *flags),
        cwd=_REPOSITORY,
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[dict[str, Any]] = []
    reading: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(START_SECONDS):
            port = await _read_until_listening(process, log)
        reading = asyncio.create_task(_read_rest(process, log))
        base_url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(base_url, timeout=aiohttp.ClientTimeout(total=30)) as http:
            yield Gateway(process, base_url, http, log)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


async def _read_until_listening(process: asyncio.subprocess.Process, log: list[dict[str, Any]]) -> int:
    assert process.stderr is not None
    lines: list[str] = []
    async for line in process.stderr:
        lines.append(line.decode(errors="replace"))
        with suppress(json.JSONDecodeError):
            event = json.loads(line)
            log.append(event)
            if event["event"] == "gateway listens":
                return int(event["port"])
    raise AssertionError("The gateway did not start:\n" + "".join(lines))


async def _read_rest(process: asyncio.subprocess.Process, log: list[dict[str, Any]]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        try:
            log.append(json.loads(line))
        except json.JSONDecodeError:
            log.append({"event": line.decode(errors="replace")})
