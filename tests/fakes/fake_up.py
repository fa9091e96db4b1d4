"""``octavo up`` with a fake for every tier; Valkey is real."""

from __future__ import annotations

import sys
from pathlib import Path

from libs.config import ConfigError
from services.supervisor.main import main

if __name__ == "__main__":
    try:
        main(sys.argv[1:], tier_command=(sys.executable, str(Path(__file__).with_name("fake_tier.py"))))
    except ConfigError as error:
        sys.exit(str(error))
