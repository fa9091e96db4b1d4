"""``octavo up`` with a fake for every tier and a real Valkey: order, restarts, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.integration.conftest import StartOctavo
from tests.integration.octavo import RunningOctavo, start_octavo

_FAKES = (sys.executable, "-m", "tests.fakes.fake_up")
_TIERS = ("gateway", "router", "engine", "worker", "telemetry", "clickhouse")


@pytest.fixture(scope="module")
def octavo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOctavo]:
    with start_octavo(tmp_path_factory.mktemp("up") / "data", command=_FAKES) as octavo:
        yield octavo


def test_prints_exactly_the_ready_line_on_stdout(octavo: RunningOctavo) -> None:
    port = octavo.base_url.rpartition(":")[2]

    assert octavo.stdout_path.read_text() == f"octavo ready http://127.0.0.1:{port}\n"


def test_relays_what_processes_print_with_their_names(octavo: RunningOctavo) -> None:
    octavo.wait_for_stderr("[worker-0] fake worker starts")

    assert (octavo.data_dir / "logs" / "worker-0.log").read_text() == "fake worker starts\n"


def test_only_workers_keep_their_priority(octavo: RunningOctavo) -> None:
    # One that has just been started is not nice yet, and the audit store is started last.
    pids = {name: octavo.wait_until_healthy(name) for name in octavo.state()["processes"]}
    niceness = {name: os.getpriority(os.PRIO_PROCESS, pid) for name, pid in pids.items()}

    own = os.getpriority(os.PRIO_PROCESS, octavo.process.pid)
    background = min(19, own + 10)
    assert niceness.pop("worker-0") == own
    assert set(niceness.values()) == {background}


def test_refuses_a_second_up_on_the_same_data_folder(octavo: RunningOctavo, tmp_path: Path) -> None:
    stderr = _failing_up(tmp_path, "--data-dir", str(octavo.data_dir))

    assert f"used by another `octavo up` (process {octavo.process.pid})" in stderr


def test_refuses_a_port_that_is_taken_before_anything_starts(octavo: RunningOctavo, tmp_path: Path) -> None:
    port = octavo.base_url.rpartition(":")[2]

    stderr = _failing_up(tmp_path, "--port", port)

    assert stderr == (
        f"octavo up: Port {port} on 127.0.0.1 is taken by another process; stop it or choose another with --port.\n"
    )


@pytest.mark.parametrize("name", ["worker-0", "engine-0", "router", "telemetry", "gateway", "clickhouse", "valkey"])
def test_starts_a_killed_process_again_at_the_same_address(octavo: RunningOctavo, name: str) -> None:
    octavo.wait_until_healthy(name)
    before = octavo.state()["processes"][name]

    killed = octavo.kill(name)
    octavo.wait_until_healthy(name, after_pid=killed)

    after = octavo.state()["processes"][name]
    assert after["address"] == before["address"]
    assert after["num_restarts"] == before["num_restarts"] + 1


def test_a_process_that_answers_nothing_is_killed_and_started_again(running_octavo: StartOctavo) -> None:
    """As in vllm-project/vllm#39863: a frozen engine keeps its connections, and nothing else would ever end it."""
    limits = ("--worker-silence-seconds", "2", "--process-silence-seconds", "2")

    with running_octavo(*limits, command=_FAKES) as octavo:
        names = ("worker-0", "engine-0", "router", "telemetry", "gateway", "clickhouse", "valkey")
        for name in names:
            octavo.wait_until_healthy(name)
        frozen = {name: octavo.kill(name, signal.SIGSTOP) for name in names}

        for name, pid in frozen.items():
            octavo.wait_until_healthy(name, after_pid=pid)

        octavo.wait_for_stderr("process does not answer and is killed")


def test_valkey_keeps_its_data_over_a_kill(octavo: RunningOctavo) -> None:
    octavo.wait_until_healthy("valkey")
    client: Redis = Redis.from_url(octavo.state()["redis_url"])
    client.set("budget:tenant", "42")
    # appendfsync everysec writes at once and syncs later: a killed process loses nothing, a lost machine a second.

    octavo.wait_until_healthy("valkey", after_pid=octavo.kill("valkey"))

    assert client.get("budget:tenant") == b"42"
    client.close()


def test_ends_senders_before_those_who_serve_them(running_octavo: StartOctavo, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    settings = [part for tier in _TIERS for part in ("--set", f"{tier}.journal={journal}")]

    with running_octavo("--engines", "2", *settings, command=_FAKES) as octavo:
        octavo.wait_until_healthy("clickhouse")
        octavo.process.send_signal(signal.SIGTERM)
        exit_code = octavo.wait_for_exit()

    ends = ["gateway", "engine", "engine", "worker", "worker", "router", "telemetry", "clickhouse"]
    assert journal.read_text().split() == ends
    assert exit_code == 0
    assert not (octavo.data_dir / "run.json").exists()


def test_leaves_nothing_behind_when_the_supervisor_is_killed(running_octavo: StartOctavo) -> None:
    with running_octavo(command=_FAKES) as octavo:
        socket_dir = Path(octavo.state()["socket_dir"])
        octavo.process.kill()
        octavo.process.wait()

        octavo.assert_nothing_left()

    # The same folder serves again at once, whatever run.json of the killed one says.
    with start_octavo(octavo.data_dir, command=_FAKES) as again:
        assert again.state()["supervisor_pid"] == again.process.pid
        assert not socket_dir.exists()


def test_a_second_interrupt_kills_what_does_not_end(running_octavo: StartOctavo) -> None:
    with running_octavo("--set", "engine.behaviour=ignore-sigterm", command=_FAKES) as octavo:
        octavo.process.send_signal(signal.SIGINT)
        octavo.wait_for_stderr('"event": "draining"')
        octavo.process.send_signal(signal.SIGINT)
        exit_code = octavo.wait_for_exit(15)

    assert exit_code == 130


def test_stops_when_a_process_refuses_its_configuration(running_octavo: StartOctavo) -> None:
    flags = ("--set", "router.behaviour=refuse-config")
    with running_octavo(*flags, command=_FAKES, ready_timeout_seconds=None) as octavo:
        exit_code = octavo.wait_for_exit()

    assert exit_code == 1
    assert "octavo up: router refused its configuration (exit code 2). Its last lines:\n" in octavo.stderr()
    assert octavo.stderr().endswith("The fake refuses its configuration.\n")


def test_stops_when_a_model_cannot_be_loaded(running_octavo: StartOctavo) -> None:
    flags = ("--set", "worker.behaviour=fail-to-load")
    with running_octavo(*flags, command=_FAKES, ready_timeout_seconds=None) as octavo:
        exit_code = octavo.wait_for_exit()

    assert exit_code == 1
    assert "octavo up: worker-0 ended 3 times before it was ever ready (exit code 1)." in octavo.stderr()
    assert "The fake has no weights." in octavo.stderr().rpartition("Its last lines:")[2]


def test_stops_when_it_is_not_ready_in_time(running_octavo: StartOctavo) -> None:
    flags = ("--set", "engine.behaviour=never-ready", "--ready-timeout-seconds", "3")
    with running_octavo(*flags, command=_FAKES, ready_timeout_seconds=None) as octavo:
        exit_code = octavo.wait_for_exit()

    assert exit_code == 1
    # On a busy machine others may not be ready either.
    said = octavo.stderr().rpartition("octavo up: ")[2]
    assert said.startswith("Not ready within 3 seconds (ready_timeout_seconds); still waiting for: ")
    assert "engine-0" in said


def test_stops_when_a_process_ends_again_and_again(running_octavo: StartOctavo) -> None:
    with running_octavo("--max-restarts-per-minute", "1", command=_FAKES) as octavo:
        octavo.wait_until_healthy("router", after_pid=octavo.kill("router"))
        octavo.kill("router")
        exit_code = octavo.wait_for_exit()

    assert exit_code == 1
    assert "octavo up: router ended more than 1 times within 60 seconds (killed by signal 9)." in octavo.stderr()


def test_a_worker_that_dies_at_each_load_is_waited_for_longer_each_time_until_it_loads(
    running_octavo: StartOctavo, tmp_path: Path
) -> None:
    too_little_memory = tmp_path / "too-little-memory"
    behaviour = f"worker.behaviour=die-at-load-while:{too_little_memory}"
    with running_octavo("--set", behaviour, command=_FAKES) as octavo:
        too_little_memory.touch()
        octavo.kill("worker-0")
        octavo.wait_for_stderr('"num_failed_starts": 3')
        too_little_memory.unlink()
        octavo.wait_for_stderr("process ready again")

        octavo.wait_until_healthy("worker-0", after_pid=octavo.kill("worker-0"))

    stderr = octavo.stderr()
    assert "process ended before it was ready again; its own log says why" in stderr
    # Who has loaded is no failure any more: its next end is the second of those that count.
    last_end = [line for line in stderr.splitlines() if "process ended" in line and '"worker-0"' in line][-1]
    assert '"restart_in_seconds": 0.2' in last_end
    assert "num_failed_starts" not in last_end


def test_runs_no_store_of_its_own_when_urls_are_given(running_octavo: StartOctavo) -> None:
    urls = ("--redis-url", "redis://127.0.0.1:1", "--clickhouse-url", "http://127.0.0.1:2")
    with running_octavo(*urls, command=_FAKES) as octavo:
        state = octavo.state()

    assert (state["redis_url"], state["clickhouse_url"]) == ("redis://127.0.0.1:1", "http://127.0.0.1:2")
    assert {"valkey", "clickhouse"}.isdisjoint(state["processes"])


def _failing_up(tmp_path: Path, *flags: str) -> str:
    """Run ``octavo up`` until it fails with exit code 1; returns its stderr."""
    command = [*_FAKES, "--port", "0", "--data-dir", str(tmp_path / "other"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr
