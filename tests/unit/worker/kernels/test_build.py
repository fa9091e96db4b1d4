from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.kernels.cpu import build as build_module
from services.worker.kernels.cpu.build import BuildFailed, build, built_file, main


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build_module, "built_file", lambda: tmp_path / "build" / "0" / "_native.so")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_build_says_what_to_install() -> None:
    with pytest.raises(BuildFailed, match="install g"):
        build()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_installing_goes_on_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    main()

    (line,) = capsys.readouterr().out.splitlines()
    assert "torch" in line


def test_other_sources_are_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "step.hpp").write_text("int one;")
    monkeypatch.setattr(build_module, "_SOURCES", tmp_path)
    before = built_file()

    (tmp_path / "step.hpp").write_text("int two;")

    assert built_file() != before
