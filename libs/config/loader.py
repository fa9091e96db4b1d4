"""Load a tier's configuration: defaults, then a TOML table, then environment, then flags."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

ConfigT = TypeVar("ConfigT")

DEFAULT_CONFIG_FILE = "octavo.toml"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, where it came from and what to do."""


def setting(
    default: Any, doc: str, *, unit: str | None = None
) -> Any:  # Any: the type of a field is its annotation.
    """Declare a field of a configuration dataclass with its default, its meaning and its unit."""
    return dataclasses.field(default=default, metadata={"doc": doc, "unit": unit})


def load(
    config_class: type[ConfigT],
    *,
    tier: str,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    default_file: Path | None = None,
) -> ConfigT:
    """Return the configuration of ``tier`` from all layers; later layers win.

    The layers are the dataclass's defaults, the table ``[tier]`` of ``--config FILE`` (or of ``octavo.toml``
    where the process runs, if there is one), ``OCTAVO_<TIER>__<FIELD>`` and ``--field-name VALUE``.

    Raises:
        ConfigError: for an unknown key, a value of the wrong type or a file that cannot be read.
    """
    parser = _parser(config_class, tier)
    flags = vars(parser.parse_args(list(argv)))
    file = flags.pop("config", None)
    values: dict[str, Any] = {}
    values.update(_from_file(config_class, tier, Path(file) if file else None, default_file))
    values.update(_from_environment(config_class, tier, os.environ if environ is None else environ))
    values.update({name: value for name, value in flags.items() if value is not None})
    return _convert(config_class, tier, values)


def _parser(config_class: type[Any], tier: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"octavo {tier}", description=(config_class.__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with a table [{tier}]")
    for field in dataclasses.fields(config_class):
        unit, default = field.metadata.get("unit"), field.default
        note = "" if default is None or default == () else f" (default: {default})"
        help_text = f"{field.metadata.get('doc', '')}{note}".replace("%", "%%")
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=None,
            metavar=(unit or "value").upper(),
            help=help_text,
        )
    return parser


def _from_file(config_class: type[Any], tier: str, file: Path | None, default_file: Path | None) -> dict[str, Any]:
    if file is None:
        file = default_file or Path(DEFAULT_CONFIG_FILE)
        if not file.exists():
            return {}
    try:
        table = tomllib.loads(file.read_text()).get(tier, {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error}.") from error
    if not isinstance(table, dict):
        raise ConfigError(f"[{tier}] in {file} must be a table.")
    _refuse_unknown(config_class, tier, table, f"[{tier}] in {file}")
    return table


def _from_environment(config_class: type[Any], tier: str, environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"OCTAVO_{tier.upper()}__"
    values = {key[len(prefix) :].lower(): value for key, value in environ.items() if key.startswith(prefix)}
    _refuse_unknown(config_class, tier, values, f"the environment ({prefix}*)")
    return values


def _refuse_unknown(config_class: type[Any], tier: str, values: Mapping[str, Any], source: str) -> None:
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"Unknown key {unknown[0]!r} in {source}; the keys of {tier} are: {', '.join(sorted(known))}."
        )


def _convert(config_class: type[ConfigT], tier: str, values: Mapping[str, Any]) -> ConfigT:
    hints = typing.get_type_hints(config_class)
    converted: dict[str, Any] = {}
    for name, value in values.items():
        try:
            converted[name] = _convert_value(value, hints[name])
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{tier}.{name} cannot be {value!r}: {error}.") from error
    try:
        return config_class(**converted)
    except ValueError as error:
        # A dataclass may check its fields against each other in __post_init__.
        raise ConfigError(f"The configuration of {tier} does not fit together: {error}") from error


def _convert_value(value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is tuple and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return msgspec.convert(value, hint, strict=not isinstance(value, str | list))
