"""The plan of processes: names, commands, order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from libs.config import ConfigError
from services.supervisor.config import TierKey, UpOptions
from services.supervisor.plan import Places, ProcessPlan, StopStage, UpPlan, plan_processes

_PLACES = Places(
    data_dir=Path("/data"),
    socket_dir=Path("/run/o"),
    tier_command=("octavo",),
    gateway_port=8000,
    gateway_grpc_port=9000,
    served_model_name="name",
    num_cores=8,
    clickhouse_port=8123,
    valkey_binary=Path("/bin/valkey-server"),
)


def _plan(*flags: str, places: Places = _PLACES, keys: tuple[TierKey, ...] = ()) -> UpPlan:
    options = UpOptions.parse(flags, {})
    return plan_processes(dataclasses.replace(options, tier_keys=keys), places)


def _process(plan: UpPlan, name: str) -> ProcessPlan:
    return next(process for process in plan.processes if process.name == name)


def test_runs_every_tier_once_and_a_pair_for_each_engine() -> None:
    names = {process.name for process in _plan("--engines", "2").processes}

    assert names == {
        "valkey",
        "clickhouse",
        "worker-0",
        "worker-1",
        "engine-0",
        "engine-1",
        "router",
        "gateway",
        "telemetry",
    }


def test_tiers_find_each_other_over_sockets() -> None:
    plan = _plan("--engines", "2", "--model", "some.gguf")

    assert _process(plan, "engine-1").command == (
        "octavo",
        "engine",
        "--engine-id=engine-1",
        "--listen-address=unix:/run/o/engine-1.sock",
        "--worker-addresses=unix:/run/o/worker-1.sock",
        "--model-name=name",
        "--redis-url=unix:///run/o/valkey.sock",
    )
    assert _process(plan, "worker-1").command[:5] == (
        "octavo",
        "worker",
        "--instance-id=worker-1",
        "--listen-address=unix:/run/o/worker-1.sock",
        "--model=some.gguf",
    )
    gateway = _process(plan, "gateway").command
    assert "--router-address=unix:/run/o/router.sock" in gateway
    assert "--telemetry-address=unix:/run/o/telemetry.sock" in gateway
    assert "--clickhouse-url=http://127.0.0.1:8123" in _process(plan, "telemetry").command


def test_the_gateway_listens_for_grpc_where_up_says() -> None:
    plan = _plan("--grpc-host", "::1")

    gateway = _process(plan, "gateway").command
    assert {"--grpc-host=::1", "--grpc-port=9000"} <= {*gateway}
    assert plan.grpc_address == "[::1]:9000"


def test_those_who_make_spans_learn_where_they_go() -> None:
    flag = "--otlp-endpoint=http://collector:4317"

    told = {process.name for process in _plan(flag).processes if flag in process.command}

    assert told == {"gateway", "router", "engine-0"}


def test_aliases_of_the_model_are_the_gateways() -> None:
    named = _process(_plan("--model-aliases", "a/b,c"), "gateway").command
    passed_through = _process(_plan("--set", "gateway.model_aliases=d"), "gateway").command

    assert "--model-aliases=a/b,c" in named
    assert any(flag.endswith("model-aliases=d") for flag in passed_through)
    assert not any("aliases" in flag for flag in _process(_plan(), "gateway").command)


def test_the_quantization_is_the_workers() -> None:
    named = _process(_plan("--quantization", "int8", "--engines", "2"), "worker-1").command
    passed_through = _process(_plan("--set", "worker.quantization=int8"), "worker-0").command

    assert "--quantization=int8" in named
    assert "--quantization=int8" in passed_through
    assert not any("quantization" in flag for flag in _process(_plan(), "worker-0").command)
    with pytest.raises(ConfigError, match=r"sets worker\.quantization itself"):
        _plan("--quantization", "int8", keys=(TierKey("worker", "quantization", "--set worker.quantization=none"),))


def test_a_socket_path_is_the_address_that_the_process_is_probed_at() -> None:
    for process in _plan("--engines", "2").processes:
        if process.socket_path is not None:
            assert process.address == f"unix:{process.socket_path}"
            assert f"--listen-address={process.address}" in process.command


def test_given_stores_replace_the_embedded_ones() -> None:
    places = dataclasses.replace(_PLACES, clickhouse_port=None, valkey_binary=None)

    plan = _plan("--redis-url", "redis://r", "--clickhouse-url", "http://c", places=places)

    assert {"valkey", "clickhouse"}.isdisjoint(process.name for process in plan.processes)
    assert "--redis-url=redis://r" in _process(plan, "router").command
    assert any(flag.startswith("--engine-addresses=unix:") for flag in _process(plan, "router").command)
    assert "--clickhouse-url=http://c" in _process(plan, "telemetry").command
    assert all(process.start_after == () for process in plan.processes)


def test_settings_reach_every_process_of_their_tier_after_the_file() -> None:
    plan = _plan("--engines", "2", "--set", "worker.runner=stub", "--set", "engine.num_blocks=7")

    for number in range(2):
        assert _process(plan, f"worker-{number}").command[-1] == "--runner=stub"
        assert _process(plan, f"engine-{number}").command[-1] == "--num-blocks=7"
    assert "--runner=stub" not in _process(plan, "gateway").command


def test_every_tier_reads_the_given_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[worker]\nnum_threads = 1\n")

    plan = _plan("--config", str(file))

    tiers = [process for process in plan.processes if process.name != "valkey"]
    assert all(process.command[2:4] == ("--config", str(file)) for process in tiers)


@pytest.mark.parametrize("setting", ["worker.model=x", "gateway.port=1", "engine.listen-address=unix:/x"])
def test_refuses_a_setting_that_up_decides_itself(setting: str) -> None:
    with pytest.raises(ConfigError, match="itself, so it cannot be set by --set"):
        _plan("--set", setting)


def test_refuses_a_key_of_the_file_that_would_be_ignored() -> None:
    key = TierKey("gateway", "port", "[gateway] in octavo.toml")

    with pytest.raises(ConfigError, match=r"gateway\.port itself, so .* \[gateway\] in octavo\.toml"):
        _plan(keys=(key,))


def test_replicas_share_the_cores_and_the_memory() -> None:
    alone, shared = _plan(), _plan("--engines", "3")

    assert not any("threads" in part or "fraction" in part for part in _process(alone, "worker-0").command)
    assert _process(shared, "worker-2").command[-2:] == ("--num-threads=2", "--kv-cache-memory-fraction=0.2000")


def test_ranks_are_workers_of_their_engine_in_order_and_share_what_there_is() -> None:
    plan = _plan("--engines", "2", "--tensor-parallel-size", "2", "--worker-silence-seconds", "7")

    workers = [process for process in plan.processes if process.name.startswith("worker-")]
    assert [worker.name for worker in workers] == ["worker-0-0", "worker-0-1", "worker-1-0", "worker-1-1"]
    assert (
        "--worker-addresses=unix:/run/o/worker-1-0.sock,unix:/run/o/worker-1-1.sock"
        in _process(plan, "engine-1").command
    )
    for worker in workers:
        assert worker.command[-2:] == ("--num-threads=2", "--kv-cache-memory-fraction=0.1500")
        assert worker.silence_limit_seconds == 7


def test_gateways_are_told_the_block_size_of_engines() -> None:
    """With another size nothing would ever be ready, and nobody would say why."""
    told = _plan("--set", "engine.block_size=8", "--set", "engine.block_size=32")
    own = _plan("--set", "engine.block_size=32", "--set", "gateway.block_size=32")

    assert _process(told, "gateway").command[-1] == "--block-size=32"
    assert _process(own, "gateway").command.count("--block-size=32") == 1
    assert not any("block-size" in part for part in _process(_plan(), "gateway").command)


def test_a_block_size_of_engines_that_up_does_not_know_must_be_said_twice() -> None:
    key = TierKey("engine", "block_size", "[engine] in octavo.toml")

    with pytest.raises(ConfigError, match=r"\[engine\] in octavo\.toml.*gateway\.block_size"):
        _plan(keys=(key,))
    _plan(keys=(key, TierKey("gateway", "block_size", "[gateway] in octavo.toml")))


def test_who_is_asked_for_signs_of_life_may_be_silent_for_so_long() -> None:
    plan = _plan("--worker-silence-seconds", "7", "--process-silence-seconds", "9")

    limits = {process.name: process.silence_limit_seconds for process in plan.processes}
    assert {name: limit for name, limit in limits.items() if limit is not None} == {
        "worker-0": 7,
        "router": 9,
        "engine-0": 9,
        "telemetry": 9,
        "gateway": 9,
        "clickhouse": 9,
        "valkey": 9,
    }
    assert "--process-silence-seconds=9.0" in _process(plan, "gateway").command


def test_what_the_user_says_about_cores_and_memory_stands() -> None:
    keys = (TierKey("worker", "kv_cache_memory_fraction", "the environment"),)

    plan = _plan("--engines", "3", "--set", "worker.num_threads=1", keys=keys)

    worker = _process(plan, "worker-0").command
    assert [part for part in worker if "threads" in part or "fraction" in part] == ["--num-threads=1"]


def test_senders_end_before_those_who_serve_them_and_stores_last() -> None:
    stages = {process.name: process.stop_stage for process in _plan().processes}

    assert sorted(stages, key=stages.__getitem__) == [
        "gateway",
        "engine-0",
        "worker-0",
        "router",
        "telemetry",
        "clickhouse",
        "valkey",
    ]
    assert len(StopStage) == len(stages)


def test_readiness_does_not_wait_for_the_audit_store() -> None:
    waiting = {process.name: process.gates_readiness for process in _plan().processes}

    assert waiting.pop("clickhouse") is False
    assert all(waiting.values())


def test_every_dependency_is_a_process_of_the_plan() -> None:
    processes = _plan("--engines", "2").processes

    assert {name for process in processes for name in process.start_after} <= {
        process.name for process in processes
    }


def test_the_audit_store_leaves_the_cores_to_the_load_of_the_models() -> None:
    assert _process(_plan("--engines", "2"), "clickhouse").start_after == ("engine-0", "engine-1")
    assert _process(_plan(), "router").start_after == ("valkey",)


def test_probes_a_wildcard_address_on_the_loopback_and_prints_what_was_asked_for() -> None:
    plan = _plan("--host", "::")

    assert plan.base_url == "http://[::]:8000"
    assert getattr(_process(plan, "gateway").probe, "host", None) == "::1"


def test_gateway_processes_are_one_process_of_the_plan_that_starts_them() -> None:
    several = _plan("--gateway-processes", "3")

    assert "--gateway-processes=3" in _process(several, "gateway").command
    assert len(several.processes) == len(_plan().processes)


def test_passwords_of_stores_are_in_no_command() -> None:
    redis_url, clickhouse_url = "redis://:secret@cache:6379", "https://me:secret@store:8443/audit"
    plan = _plan("--redis-url", redis_url, "--clickhouse-url", clickhouse_url)

    for process in plan.processes:
        assert not any("secret" in part for part in process.command)
    for name in ("gateway", "router", "engine-0"):
        process = _process(plan, name)
        assert process.environ == {f"OCTAVO_{name.partition('-')[0].upper()}__REDIS_URL": redis_url}
    assert _process(plan, "telemetry").environ == {"OCTAVO_TELEMETRY__CLICKHOUSE_URL": clickhouse_url}
