"""The data folder's lock and the folder of sockets."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.supervisor.data_dir import RunningProcess, RunState, open_data_dir, private_socket_dir
from services.supervisor.failures import UpFailed


def _state(supervisor_pid: int) -> RunState:
    child = RunningProcess(pid=None, address="a", num_restarts=0, is_healthy=False, log="l")
    return RunState(supervisor_pid, False, "http://x", "x:1", "redis://x", "http://c", "/s", {"router": child})


def test_makes_its_parts_and_keeps_itself_out_of_repositories(tmp_path: Path) -> None:
    with open_data_dir(tmp_path / "a" / "data") as data_dir:
        assert data_dir.log_path("router").parent.is_dir()
        assert (data_dir.path / "valkey").is_dir()

    assert (tmp_path / "a" / "data" / ".gitignore").read_text() == "*\n"


def test_refuses_a_folder_whose_owner_lives(tmp_path: Path) -> None:
    with open_data_dir(tmp_path) as data_dir:
        data_dir.write_run_state(_state(os.getpid()))

        with (
            pytest.raises(UpFailed, match=rf"another `octavo up` \(process {os.getpid()}\)"),
            open_data_dir(tmp_path, wait_seconds=0),
        ):
            pass


def test_waits_for_the_processes_of_an_owner_that_was_killed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with open_data_dir(tmp_path) as data_dir:
        data_dir.write_run_state(_state(dead.pid))
        # A process that inherited the lock and is about to end.
        survivor = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            pass_fds=(data_dir.lock_fd,),
        )
    (tmp_path / "run.json").write_text(json.dumps({"supervisor_pid": dead.pid}))

    with (
        pytest.raises(UpFailed, match="still used by processes of an earlier"),
        open_data_dir(tmp_path, wait_seconds=0),
    ):
        pass
    survivor.communicate()
    with open_data_dir(tmp_path):
        pass


def test_removes_the_sockets_of_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    with private_socket_dir() as folder:
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(folder / "router.sock"))
        (tmp_path / "run.json").write_text(json.dumps({"socket_dir": str(folder)}))

        with open_data_dir(tmp_path):
            assert not folder.exists()


def test_removes_no_folder_that_is_not_of_its_making(tmp_path: Path) -> None:
    others = tmp_path / "octavo-precious"
    others.mkdir()
    (others / "thesis.txt").write_text("years of work")
    (tmp_path / "run.json").write_text(json.dumps({"socket_dir": str(others)}))

    with open_data_dir(tmp_path):
        pass

    assert (others / "thesis.txt").exists()


def test_a_run_file_that_is_broken_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[1")

    with open_data_dir(tmp_path):
        pass

    assert not (tmp_path / "run.json").exists()


def test_says_that_a_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UpFailed, match="cannot be used"), open_data_dir(tmp_path / "file"):
        pass


def test_the_socket_folder_is_private_short_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_folder = tmp_path / ("x" * 100)
    long_folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long_folder))

    with private_socket_dir() as folder:
        mode = stat.S_IMODE(folder.stat().st_mode)
        (folder / "left.sock").touch()

    assert mode == 0o700
    assert len(str(folder)) + len("/telemetry-00.sock") < 108
    assert not folder.exists()


def test_nobody_else_can_look_into_it(tmp_path: Path) -> None:
    with open_data_dir(tmp_path / "data") as data_dir:
        data_dir.write_run_state(_state(os.getpid()))
        data_dir.write_run_state(_state(os.getpid()))

        assert (tmp_path / "data").stat().st_mode & 0o077 == 0
        assert (tmp_path / "data" / "run.json").stat().st_mode & 0o077 == 0
