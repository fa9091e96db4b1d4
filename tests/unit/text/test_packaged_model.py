from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from libs.errors import ModelLoadFailed
from libs.text.packaged_model import SplitFileModel, WholeFileModel

CONTENTS = [b"GGUF" + b"a" * 3_000_000, b"b" * 100, b"c"]
MODEL = SplitFileModel(
    name="small",
    distribution="small-model",
    package="small_model",
    parts=("small_part1", "small_part2", "small_part3"),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return tmp_path / "home"


def install(packages: Path, contents: list[bytes], digest: str) -> None:
    files = {"small_model": ("SHA256SUMS", f"{digest}  small.gguf\n".encode())}
    files |= {f"small_part{n}": (f"small.gguf.part0{n - 1}", data) for n, data in enumerate(contents, start=1)}
    for package, (file, data) in files.items():
        (packages / package / "data").mkdir(parents=True)
        # Importing it would be a mistake.
        (packages / package / "__init__.py").write_text("raise ImportError")
        (packages / package / "data" / file).write_bytes(data)


def digest_of(contents: list[bytes]) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def test_parts_are_joined_once_in_the_users_cache(tmp_path: Path, home: Path) -> None:
    install(tmp_path / "packages", CONTENTS, digest_of(CONTENTS))

    path = MODEL.prepare()
    written_at = path.stat().st_mtime_ns

    assert path.is_relative_to(home)
    assert path.name == "small.gguf"
    assert path.read_bytes() == b"".join(CONTENTS)
    assert MODEL.find() == MODEL.prepare() == path
    assert path.stat().st_mtime_ns == written_at
    assert [file.name for file in path.parent.iterdir()] == ["small.gguf"]


def test_a_file_of_another_size_is_made_again(tmp_path: Path) -> None:
    install(tmp_path / "packages", CONTENTS, digest_of(CONTENTS))
    path = MODEL.prepare()
    path.write_bytes(b"torn")

    assert MODEL.prepare().read_bytes() == b"".join(CONTENTS)


def test_parts_that_do_not_make_the_file_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    install(tmp_path / "packages", CONTENTS, digest_of([b"other"]))

    with pytest.raises(ModelLoadFailed, match=r"small\.gguf do not make the file"):
        MODEL.prepare()

    path = MODEL.find()
    assert path is not None
    assert list(path.parent.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, home: Path) -> None:
    install(tmp_path / "packages", CONTENTS, digest_of(CONTENTS))
    home.write_text("not a folder")

    with pytest.raises(ModelLoadFailed, match=r"small cannot be joined in .*home"):
        MODEL.prepare()


@pytest.mark.parametrize("num_parts", [0, 2])
def test_without_all_packages_the_error_says_what_to_install(tmp_path: Path, num_parts: int) -> None:
    if num_parts:
        install(tmp_path / "packages", CONTENTS[:num_parts], digest_of(CONTENTS))

    assert MODEL.find() is None
    with pytest.raises(ModelLoadFailed, match=r"package small-model, which is not installed"):
        MODEL.prepare()


def test_a_whole_file_is_found_without_importing_its_package(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "whole_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")
    (package / "whole.gguf").write_bytes(b"GGUF")
    model = WholeFileModel(name="whole", distribution="whole-model", package="whole_model")

    assert model.prepare() == model.find() == package / "whole.gguf"
