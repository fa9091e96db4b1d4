"""Record golden transcripts: ``python -m tests.sim.record NAME …`` or ``--all``. Read them before you keep them."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.sim.scenarios import SCENARIOS

TRANSCRIPTS = Path(__file__).parent / "transcripts"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.record", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SCENARIOS], metavar="NAME", help="scenarios to record")
    parser.add_argument("--all", action="store_true", help="record all")
    arguments = parser.parse_args()
    if not arguments.names and not arguments.all:
        parser.error("give the names of scenarios, or --all")
    for name in SCENARIOS if arguments.all else arguments.names:
        path = TRANSCRIPTS / f"{name}.txt"
        path.write_text(SCENARIOS[name]().text, encoding="utf-8")
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
