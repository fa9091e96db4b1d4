"""The command line of ``octavo up`` and what it passes to tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.config import ConfigError
from services.supervisor.config import QUANTIZATIONS, TierKey, TierSetting, UpOptions
from services.worker.config import Quantization


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_settings_can_be_repeated_and_keep_commas_and_equal_signs() -> None:
    argv = ["--set", "engine.a_b=x,y", "--port", "9", "--set=worker.dtype=float32", "--set", "gateway.c=d=e"]

    options = UpOptions.parse(argv, {})

    assert options.tier_settings == (
        TierSetting("engine", "a_b", "x,y"),
        TierSetting("worker", "dtype", "float32"),
        TierSetting("gateway", "c", "d=e"),
    )
    assert options.config.port == 9


def test_a_setting_becomes_one_flag_whatever_its_value() -> None:
    setting = TierSetting.parse("worker.kv_cache_memory=--odd value")

    assert setting.flag == "--kv-cache-memory=--odd value"


def test_quantizations_are_those_of_workers() -> None:
    assert set(QUANTIZATIONS) == set(Quantization)
    with pytest.raises(ConfigError, match="quantization must be none or int8, not 'int4'"):
        UpOptions.parse(["--quantization", "int4"], {})


@pytest.mark.parametrize("text", ["worker", "worker.dtype", "dtype=float32", "worker.=1", "=", ""])
def test_refuses_a_setting_that_is_not_tier_field_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set needs tier\.field=value"):
        TierSetting.parse(text)


def test_refuses_a_setting_of_an_unknown_tier() -> None:
    with pytest.raises(ConfigError, match="no tier 'wroker'; the tiers are: gateway, router"):
        TierSetting.parse("wroker.dtype=float32")


def test_settings_of_file_environment_and_flags_come_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[up]\nset = ["worker.a=1,2"]\n')

    of_file = UpOptions.parse(["--config", str(file), "--set", "worker.b=3"], {})
    of_environment = UpOptions.parse(["--set", "worker.b=3"], {"OCTAVO_UP__SET": "worker.c=4, worker.d=5"})

    assert [setting.flag for setting in of_file.tier_settings] == ["--a=1,2", "--b=3"]
    assert [setting.flag for setting in of_environment.tier_settings] == ["--c=4", "--d=5", "--b=3"]


@pytest.mark.parametrize("flag", ["--redis-url=nonsense", "--clickhouse-url=redis://x"])
def test_refuses_a_url_of_another_kind(flag: str) -> None:
    with pytest.raises(ConfigError, match="must begin with"):
        UpOptions.parse([flag], {})


def test_names_what_file_and_environment_set_for_tiers(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[up]\nport = 1\n[worker]\ndtype = "float32"\n')

    options = UpOptions.parse(["--config", str(file)], {"OCTAVO_ENGINE__MAX_NUM_SEQS": "4", "OTHER": "1"})

    assert options.tier_keys == (
        TierKey("worker", "dtype", f"[worker] in {file}"),
        TierKey("engine", "max_num_seqs", "OCTAVO_ENGINE__MAX_NUM_SEQS in the environment"),
    )


def test_reads_octavo_toml_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "octavo.toml").write_text("[up]\nport = 77\n[engine]\nnum_blocks = 9\n")

    options = UpOptions.parse([], {})

    assert options.config.port == 77
    assert options.config_file is None
    assert [key.field for key in options.tier_keys] == ["num_blocks"]


@pytest.mark.parametrize("text", ["[wroker]\na = 1\n", "port = 1\n"])
def test_refuses_a_table_that_no_tier_reads(tmp_path: Path, text: str) -> None:
    (tmp_path / "octavo.toml").write_text(text)

    with pytest.raises(ConfigError, match="Unknown table"):
        UpOptions.parse([], {})


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "65536"],
        ["--port", "-1"],
        ["--engines", "0"],
        ["--engines", "65"],
        ["--engines", "two"],
        ["--background-nice", "20"],
        ["--ready-timeout-seconds", "0"],
        ["--ready-timeout-seconds", "nan"],
        ["--drain-timeout-seconds", "-1"],
        ["--max-restarts-per-minute", "0"],
        ["--log-level", "loud"],
    ],
)
def test_refuses_numbers_that_mean_nothing(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        UpOptions.parse(flags, {})
