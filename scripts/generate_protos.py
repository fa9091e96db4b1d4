"""Generate libs/protogen from protos/, or check that it is fresh.

protoc names Python modules after file paths, so the generated imports are rewritten to live under
``libs.protogen``: the one place that the import contracts know.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.rpc import status_pb2

REPOSITORY = Path(__file__).resolve().parent.parent
PROTOS = REPOSITORY / "protos"
PROTOGEN = REPOSITORY / "libs" / "protogen"
_IMPORT = re.compile(r"^(\s*)(from|import) octavo\b", re.MULTILINE)
_STUB_REFERENCE = re.compile(r"(?<![\w.])octavo\.(\w+)\.v1\.")


def generate(target: Path) -> None:
    """Write the generated package tree to ``target``, replacing what is there."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
        includes = Path(grpc_tools.__file__).parent / "_proto"
        googleapis = Path(str(status_pb2.__file__)).parent.parent.parent
        command = [sys.executable, "-m", "grpc_tools.protoc"]
        command += [f"-I{folder}" for folder in (PROTOS, includes, googleapis)]
        command += [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        # protoc finds mypy's plugins by PATH, and this environment need not be an active one.
        search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environ = {**os.environ, "PATH": search_path}
        # stderr is shown only when it fails: the plugins tell each file that they write.
        done = subprocess.run([*command, *sources], capture_output=True, text=True, env=environ, check=False)
        if done.returncode != 0:
            sys.exit(f"protoc failed:\n{done.stderr}")
        shutil.rmtree(target, ignore_errors=True)
        for path in sorted(Path(scratch).rglob("*")):
            if path.suffix not in (".py", ".pyi"):
                continue
            destination = target / path.relative_to(Path(scratch) / "octavo")
            destination.parent.mkdir(parents=True, exist_ok=True)
            text = _IMPORT.sub(r"\1\2 libs.protogen", path.read_text())
            if path.suffix == ".pyi":
                text = _STUB_REFERENCE.sub(r"libs.protogen.\1.v1.", text)
            destination.write_text(text)
        for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            (folder / "__init__.py").write_text('"""Generated code; see scripts/generate_protos.py."""\n')


def is_fresh() -> bool:
    """Say whether the committed code is what the protos generate now."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "protogen"
        generate(fresh)
        names = {path.relative_to(fresh) for path in fresh.rglob("*.py*") if path.suffix in (".py", ".pyi")}
        committed = {
            path.relative_to(PROTOGEN) for path in PROTOGEN.rglob("*.py*") if path.suffix in (".py", ".pyi")
        }
        return names == committed and all(
            filecmp.cmp(fresh / name, PROTOGEN / name, shallow=False) for name in names
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the committed code is stale")
    if not parser.parse_args().check:
        generate(PROTOGEN)
    elif not is_fresh():
        sys.exit("libs/protogen is stale: run `make proto` and commit the result.")


if __name__ == "__main__":
    main()
