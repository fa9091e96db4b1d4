"""Only workers load torch; the other tiers start without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("torch", "transformers", "triton")
_SCRIPT = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize("tier", ["gateway", "router", "engine", "supervisor", "telemetry"])
def test_a_tier_imports_no_torch(tier: str) -> None:
    loaded = subprocess.check_output([sys.executable, "-c", _SCRIPT, f"services.{tier}", *_HEAVY], text=True)

    assert loaded.split() == []


def test_the_stub_runner_imports_no_torch() -> None:
    script = "import services.worker.main, services.worker.stub_runner, sys; print('torch' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
