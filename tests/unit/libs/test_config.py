"""The layers of a tier's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from libs.config import ConfigError, load, setting


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark_blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaintConfig:
    """A tier that paints.

    Second paragraph.
    """

    max_strokes: int = setting(5, "Strokes at once.", unit="strokes")
    pause_seconds: float = setting(0.5, "Time between strokes.", unit="seconds")
    is_wet: bool = setting(True, "Whether 100% of the paint is wet.")
    brush: str | None = setting(None, "Which brush.")
    palette: tuple[str, ...] = setting((), "Colours in reach.")
    colour: Colour = setting(Colour.RED, "Colour of the paint.")

    def __post_init__(self) -> None:
        if self.max_strokes < 1:
            raise ValueError("max_strokes must be at least 1.")


def _load(*argv: str, environ: dict[str, str] | None = None, file: Path | None = None) -> PaintConfig:
    return load(PaintConfig, tier="paint", argv=argv, environ=environ or {}, default_file=file or Path("/nowhere"))


def _toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "octavo.toml"
    file.write_text(text)
    return file


def test_without_any_layer_the_defaults_stand() -> None:
    assert _load() == PaintConfig()


def test_later_layers_win_field_by_field(tmp_path: Path) -> None:
    file = _toml(tmp_path, '[paint]\nmax_strokes = 1\npause_seconds = 1.0\nbrush = "file"\n')
    environ = {"OCTAVO_PAINT__PAUSE_SECONDS": "2", "OCTAVO_PAINT__BRUSH": "environment"}

    config = _load("--brush", "flag", environ=environ, file=file)

    assert config == PaintConfig(max_strokes=1, pause_seconds=2.0, brush="flag")


def test_a_flag_with_the_defaults_value_still_wins(tmp_path: Path) -> None:
    file = _toml(tmp_path, "[paint]\nmax_strokes = 9\n")

    assert _load("--max-strokes", "5", file=file).max_strokes == 5


def test_the_file_named_by_a_flag_replaces_the_default_file(tmp_path: Path) -> None:
    default = _toml(tmp_path, "[paint]\nmax_strokes = 9\n")
    named = tmp_path / "named.toml"
    named.write_text("[paint]\npause_seconds = 3\n")

    assert _load("--config", str(named), file=default) == PaintConfig(pause_seconds=3.0)


def test_tables_of_other_tiers_are_left_alone(tmp_path: Path) -> None:
    file = _toml(tmp_path, "[router]\nanything = 1\n")

    assert _load(environ={"OCTAVO_ROUTER__ANYTHING": "1"}, file=file) == PaintConfig()


def test_refuses_an_unknown_key_of_the_file(tmp_path: Path) -> None:
    file = _toml(tmp_path, "[paint]\nmax_stroke = 1\n")

    with pytest.raises(ConfigError, match=rf"Unknown key 'max_stroke' in \[paint\] in {file}; .*max_strokes"):
        _load(file=file)


def test_refuses_an_unknown_key_of_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"Unknown key 'max_stroke' in the environment \(OCTAVO_PAINT__\*\)"):
        _load(environ={"OCTAVO_PAINT__MAX_STROKE": "1"})


@pytest.mark.parametrize("flag", ["--max-stroke", "--unknown"])
def test_refuses_an_unknown_flag_and_never_completes_one(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _load(flag, "1")

    assert stopped.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "text", "field", "value"),
    [
        ("--max-strokes", "7", "max_strokes", 7),
        ("--pause-seconds", "2", "pause_seconds", 2.0),
        ("--pause-seconds", "1e-3", "pause_seconds", 0.001),
        ("--is-wet", "false", "is_wet", False),
        ("--is-wet", "true", "is_wet", True),
        ("--is-wet", "0", "is_wet", False),
        ("--brush", "7", "brush", "7"),
        ("--palette", "red, blue,,green", "palette", ("red", "blue", "green")),
        ("--palette", "", "palette", ()),
        ("--colour", "dark_blue", "colour", Colour.DARK_BLUE),
    ],
)
def test_text_becomes_the_fields_type(flag: str, text: str, field: str, value: object) -> None:
    by_flag = getattr(_load(flag, text), field)
    by_environment = getattr(_load(environ={f"OCTAVO_PAINT__{field.upper()}": text}), field)

    assert by_flag == by_environment == value
    assert type(by_flag) is type(value)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--max-strokes", "many"),
        ("--max-strokes", "1.5"),
        ("--pause-seconds", "soon"),
        ("--is-wet", "perhaps"),
        ("--colour", "green"),
    ],
)
def test_refuses_a_value_of_the_wrong_type(flag: str, text: str) -> None:
    field = flag.removeprefix("--").replace("-", "_")

    with pytest.raises(ConfigError, match=rf"paint\.{field} cannot be '{text}'"):
        _load(flag, text)


def test_the_file_has_types_of_its_own_that_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_strokes cannot be 1\.5"):
        _load(file=_toml(tmp_path, "[paint]\nmax_strokes = 1.5\n"))


def test_the_file_gives_lists_as_lists(tmp_path: Path) -> None:
    assert _load(file=_toml(tmp_path, '[paint]\npalette = ["a,b", "c"]\n')).palette == ("a,b", "c")


def test_fields_that_do_not_fit_together_are_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="paint does not fit together: max_strokes must be at least 1"):
        _load("--max-strokes", "0")


@pytest.mark.parametrize("text", ["[paint\n", "paint = 3\n"])
def test_refuses_a_file_that_is_no_table(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"octavo\.toml"):
        _load(file=_toml(tmp_path, text))


def test_refuses_a_named_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        _load("--config", str(tmp_path / "missing.toml"))


def test_refuses_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_bytes(b"\xff\xfe[paint]")

    with pytest.raises(ConfigError, match="cannot be read"):
        _load("--config", str(file))


def test_help_shows_each_field_with_unit_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _load("--help")

    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "--max-strokes STROKES" in shown
    assert "Strokes at once. (default: 5)" in shown
    assert "100% of the paint" in shown
