"""The one console command, ``octavo``: it imports only the tier that it is asked to run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from libs.config import ConfigError

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Command:
    """A command, the module whose ``main`` runs it, and one line about it."""

    module: str
    summary: str


_COMMANDS = {
    "up": _Command("services.supervisor.main", "all tiers as processes on this machine, with embedded stores"),
    "gateway": _Command("services.gateway.main", "the OpenAI-compatible HTTP API"),
    "keys": _Command("services.gateway.keys_command", "makes, lists and revokes API keys"),
    "router": _Command("services.router.main", "places requests on engines"),
    "engine": _Command("services.engine.main", "schedules one replica of a model"),
    "worker": _Command("services.worker.main", "runs a model on one accelerator"),
    "telemetry": _Command("services.telemetry.main", "writes the audit of requests"),
    "clickhouse": _Command("services.telemetry.embedded_clickhouse.main", "the embedded ClickHouse"),
}

_USAGE = "\n".join(
    [
        "usage: octavo COMMAND [flags]",
        "",
        "commands:",
        *(f"  {name:<12}{command.summary}" for name, command in _COMMANDS.items()),
        "",
        "`octavo COMMAND --help` lists the flags of a command. `octavo --version` prints the version.",
    ]
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 for success, 2 for a command or configuration that cannot be used."""
    # gRPC reads it when it is imported. It would write lines of its own beside our log when a peer dies.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        print(_USAGE)
    elif name == "--version":
        print(f"octavo {_version()}")
    elif name in _COMMANDS:
        _run(name, arguments[1:])
    elif name:
        print(f"octavo: there is no command {name!r}.\n\n{_USAGE}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    else:
        print(_USAGE, file=sys.stderr)
        sys.exit(_EXIT_USAGE)


def _run(name: str, arguments: Sequence[str]) -> None:
    try:
        importlib.import_module(_COMMANDS[name].module).main(arguments)
    except ConfigError as error:
        print(f"octavo {name}: {error}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _version() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
