"""The console command: which words it knows and what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services import cli


def _octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_command() -> None:
    done = _octavo("--help")

    assert done.returncode == 0
    for name in ("up", "gateway", "router", "engine", "worker", "telemetry", "clickhouse"):
        assert f"\n  {name} " in done.stdout


def test_no_command_is_an_error_that_shows_the_usage() -> None:
    done = _octavo()

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: octavo COMMAND")


def test_an_unknown_command_is_named() -> None:
    done = _octavo("rotuer", "--port", "1")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("octavo: there is no command 'rotuer'.\n")


def test_a_wrong_configuration_is_one_clear_line() -> None:
    done = _octavo("up", "--port", "99999")

    assert done.returncode == 2
    assert done.stderr.startswith("octavo up: ")
    assert done.stderr.count("\n") == 1
    assert "port must be between 0 and 65535" in done.stderr


def test_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])

    assert capsys.readouterr().out.startswith("octavo ")


def test_asking_for_help_imports_no_tier() -> None:
    script = (
        "import sys; from services import cli; cli.main(['--help']);"
        "print([name for name in sys.modules if name.startswith('services.') and name != 'services.cli'])"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.splitlines()[-1] == "[]"
