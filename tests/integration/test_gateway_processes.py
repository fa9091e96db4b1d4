"""Several gateway processes on one port, between fakes of the other tiers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from libs.lifecycle import SUPERVISED_VARIABLE
from libs.protogen.telemetry.v1 import telemetry_pb2
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, START_SECONDS, Stand, open_stand, write_keys
from tests.patience import PATIENCE_SECONDS

NUM_REQUESTS = 50
BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path, "--gateway-processes", "2", "--audit-flush-seconds", "0.02") as stand:
        await until_started(stand, 2)
        yield stand


async def post(stand: Stand, **fields: object) -> dict[str, object]:
    """Ask over a connection of its own, so that the kernel chooses the process."""
    async with (
        aiohttp.ClientSession(stand.gateway.base_url, timeout=aiohttp.ClientTimeout(total=30)) as http,
        http.post("/v1/chat/completions", json=BODY | fields) as response,
    ):
        answer: dict[str, object] = await response.json()
        assert response.status == 200, answer
        return answer


async def counts(stand: Stand, name: str) -> float:
    """Read a metric from whichever process answers."""
    async with aiohttp.ClientSession(stand.gateway.base_url) as http, http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def starts(stand: Stand) -> Counter[str]:
    """Count how often each process has begun to listen."""
    return Counter(event["instance_id"] for event in stand.gateway.log if event["event"] == "gateway listens")


def children(stand: Stand) -> list[int]:
    pid = stand.gateway.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until_started(stand: Stand, num_starts: int) -> None:
    """Wait until processes have begun to listen so often, and whichever answers has an engine."""
    async with asyncio.timeout(START_SECONDS):
        while starts(stand).total() < num_starts:
            await asyncio.sleep(0.02)
        num_ready = 0
        while num_ready < 12:
            async with aiohttp.ClientSession(stand.gateway.base_url) as http, http.get("/readyz") as response:
                num_ready = num_ready + 1 if response.status == 200 else 0


async def test_any_process_shows_what_all_have_counted(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b"))

    await asyncio.gather(*(post(stand) for _ in range(NUM_REQUESTS)))
    seen = {await counts(stand, "octavo_gateway_requests_started_total") for _ in range(10)}

    assert seen == {NUM_REQUESTS}
    assert await counts(stand, "octavo_gateway_requests_ended_total") == NUM_REQUESTS
    assert await counts(stand, "octavo_gateway_ttft_seconds_count") == NUM_REQUESTS
    assert await counts(stand, "octavo_gateway_requests_in_flight") == 0
    # An engine is not counted once for each process.
    assert await counts(stand, "octavo_engine_kv_blocks_total") == 100
    await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) == NUM_REQUESTS)
    assert {record.gateway_id for record in stand.telemetry.records} == {"gateway-0-0", "gateway-0-1"}


async def test_a_killed_process_takes_only_its_own_requests(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b"), hangs=True)
    hanging = [asyncio.create_task(post(stand)) for _ in range(20)]
    await stand.engine.wait_until(lambda: len(stand.engine.running_ids) == len(hanging))
    stand.engine.default_script = Script(token_ids=stand.encode("a b"))
    started_before = await counts(stand, "octavo_gateway_requests_started_total")

    os.kill(children(stand)[0], signal.SIGKILL)
    await until_started(stand, 3)
    await asyncio.gather(*(post(stand) for _ in range(10)))

    assert await counts(stand, "octavo_gateway_requests_started_total") == started_before + 10
    num_lost = sum(task.done() for task in hanging)
    assert 0 < num_lost < len(hanging)
    await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) == 10 + num_lost)
    statuses = Counter(record.status for record in stand.telemetry.records)
    assert statuses[telemetry_pb2.REQUEST_STATUS_GATEWAY_LOST] == num_lost
    assert await counts(stand, "octavo_gateway_requests_in_flight") == len(hanging) - num_lost
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_frozen_process_is_killed_and_started_again(tmp_path: Path) -> None:
    """The kernel goes on giving it connections, which nobody would ever answer."""
    flags = ("--gateway-processes", "2", "--process-silence-seconds", "1")
    async with open_stand(tmp_path, *flags) as stand:
        await until_started(stand, 2)
        stand.engine.default_script = Script(token_ids=stand.encode("a b"))

        frozen = children(stand)[0]
        os.kill(frozen, signal.SIGSTOP)
        await until_started(stand, 3)
        await asyncio.gather(*(post(stand) for _ in range(10)))

        assert frozen not in children(stand)


async def test_a_supervisor_can_kill_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that outlived a frozen parent kept its successor's from their spools until they had drained."""
    monkeypatch.setenv(SUPERVISED_VARIABLE, str(os.getpid()))
    async with open_stand(tmp_path, "--gateway-processes", "2") as stand:
        await until_started(stand, 2)

        groups = {os.getpgid(pid) for pid in (stand.gateway.process.pid, *children(stand))}

    assert len(groups) == 1


@pytest.mark.slow
async def test_one_process_drains_while_the_other_serves(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b c d"), step_delay_seconds=0.2)
    running = [asyncio.create_task(post(stand)) for _ in range(8)]
    await stand.engine.wait_until(lambda: len(stand.engine.running_ids) == len(running))
    stand.engine.default_script = Script(token_ids=stand.encode("a b"))

    os.kill(children(stand)[0], signal.SIGTERM)
    later = [await post(stand) for _ in range(20)]

    assert len(later) == 20
    assert len(await asyncio.gather(*running)) == 8


@pytest.mark.slow
async def test_a_new_key_is_known_to_all_and_a_revoked_one_to_none(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", {"old": "acme"})
    flags = ("--gateway-processes", "2", "--api-keys-file", str(keys), "--api-keys-poll-seconds", "0.05")

    async with open_stand(tmp_path / "data", *flags) as stand:
        await until_started(stand, 2)
        write_keys(keys, {"new": "acme"})
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await statuses_of(stand, "new") != {200}:
                await asyncio.sleep(0.05)

        assert await statuses_of(stand, "old") == {401}


async def statuses_of(stand: Stand, key: str) -> set[int]:
    """Ask with a key over enough connections that all processes are among those who answer."""
    statuses = set()
    for _ in range(16):
        async with (
            aiohttp.ClientSession(stand.gateway.base_url, headers={"Authorization": f"Bearer {key}"}) as http,
            http.get("/v1/models") as response,
        ):
            statuses.add(response.status)
    return statuses


@pytest.mark.slow
async def test_a_group_that_cannot_start_says_so_and_ends(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "gateway", "--port", "0", "--data-dir", str(tmp_path)),
        *("--gateway-processes", "2", "--model", str(tmp_path / "nothing")),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, log = await process.communicate()

    assert process.returncode == 1
    assert b"ended 3 times soon after its start" in log


async def test_all_drain_at_the_end(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b c d"), step_delay_seconds=0.05)
    running = [asyncio.create_task(post(stand)) for _ in range(4)]
    await stand.engine.wait_until(lambda: len(stand.engine.running_ids) == len(running))

    stand.gateway.terminate()

    assert len(await asyncio.gather(*running)) == 4
    assert await stand.gateway.wait_exit() == 0
