"""Compiles the CPU kernels with the system's C++ compiler: ``python -m services.worker.kernels.cpu.build``.

With ``OCTAVO_SANITIZE=1`` in the environment it compiles, and workers load, kernels that check every address and
every arithmetic operation (ASan, UBSan); the process must preload the sanitizer's runtime (`sanitizer_runtime`).

Owns the compiler's flags and where the result lies: a folder named after a digest of the sources, so that kernels
and sources never differ. It must not know what the kernels compute. Units that are meant for one instruction set
get its flags; nothing is compiled for the processor of this machine alone, which need not be the one that runs it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
_SOURCES = _FOLDER / "src"
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_SECONDS = 1_200.0

# Without contraction a product and a sum are one operation only where the source says so: a row's result must not
# depend on what the compiler did in one of several copies of a loop.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wall")
# Checks of single pointers add nothing to those of addresses, but minutes of compile time for every template. So do
# checks in each copy of an inlined function, beside those in one that all call.
_SANITIZER_FLAGS = (
    "-O1",
    "-DOCTAVO_INLINE=inline",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,alignment,object-size,vptr",
    "-fno-sanitize-recover=all",
)
_BINDING_FLAGS = ("-Os", *_FLAGS[1:3], "-fvisibility=hidden", "-fno-strict-aliasing", "-DNB_COMPACT_ASSERTIONS")
# Lines that are fetched to be written come as the own: a processor that has no such fetch passes over it.
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mprfchw")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma", "-mprfchw")
_X86_UNITS = {
    "sampling_avx2.cpp": _AVX2_FLAGS,
    "sampling_avx512.cpp": _AVX512_FLAGS,
    "step_avx2.cpp": _AVX2_FLAGS,
    "step_avx512.cpp": _AVX512_FLAGS,
    "step_amx.cpp": (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}


_ANY_PROCESSOR_UNITS = (
    "sampling_portable.cpp",
    "step_portable.cpp",
    "sampler.cpp",
    "collective.cpp",
    "model.cpp",
    "packing.cpp",
    "memory.cpp",
    "pool.cpp",
)


class BuildFailed(Exception):
    """The kernels cannot be compiled here; the text says why."""


def built_file() -> Path:
    """Return where the extension of these sources lies once it is built."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.iterdir(), Path(__file__)]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    return _FOLDER / _build_folder() / digest.hexdigest()[:16] / f"_native{suffix}"


def sanitizer_runtime() -> tuple[Path, ...]:
    """Return the libraries that a process must preload (LD_PRELOAD) to use kernels compiled for checking.

    The runtime looks for the C++ library's functions when it starts, so that Python must have that library by then.

    Raises:
        BuildFailed: when the compiler is missing or brings none.
    """
    return tuple(_find_library(name) for name in ("libasan.so", "libstdc++.so.6"))


def build() -> Path:
    """Compile the extension unless it is there, and return its file.

    Raises:
        BuildFailed: when there is no compiler, no nanobind, or the compiler fails.
    """
    target = built_file()
    if target.exists():
        return target
    compiler = _find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = _compile(compiler, Path(folder))
        linked = Path(folder) / target.name
        _run(
            [
                compiler,
                "-shared",
                "-pthread",
                *_sanitizer_flags(),
                *_link_flags(),
                *map(str, objects),
                "-o",
                str(linked),
            ]
        )
        linked.replace(target)  # At once, so that a process that starts now sees all of it or nothing.
    for folder_of_older_sources in target.parent.parent.iterdir():
        if folder_of_older_sources != target.parent:
            shutil.rmtree(folder_of_older_sources, ignore_errors=True)
    return target


def main() -> None:
    """Build unless that is done, and say in one line what became of it."""
    if built_file().exists():
        return
    try:
        print(f"CPU kernels: built {build().relative_to(_FOLDER)}")
    except BuildFailed as failure:
        print(f"CPU kernels: not built, so workers compute with torch, which is several times slower: {failure}")


def _compile(compiler: str, folder: Path) -> list[Path]:
    nanobind = _import_nanobind()
    include = ["-I" + str(sysconfig.get_path("include")), "-I" + nanobind.include_dir()]
    nanobind_source = Path(nanobind.source_dir())
    robin_map = "-I" + str(nanobind_source.parent / "ext" / "robin_map" / "include")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*_FLAGS, "-pthread", *(["-DOCTAVO_X86"] if is_x86 else []), *_sanitizer_flags()]
    units: list[tuple[Path, list[str]]] = [
        (_SOURCES / name, [*flags, *isa_flags]) for name, isa_flags in (_X86_UNITS.items() if is_x86 else ())
    ]
    units += [(_SOURCES / name, flags) for name in _ANY_PROCESSOR_UNITS]
    units.append((_SOURCES / "module.cpp", [*flags, "-Os", *include]))
    units.append((nanobind_source / "nb_combined.cpp", [*_BINDING_FLAGS, *include, robin_map]))
    # The slowest first, as many at once as there are cores.
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        objects = [folder / f"{source.stem}.o" for source, _ in units]
        jobs = [
            threads.submit(_run, [compiler, *unit_flags, "-c", str(source), "-o", str(to)])
            for (source, unit_flags), to in reversed(list(zip(units, objects, strict=True)))
        ]
        for job in jobs:
            job.result()
    return objects


def _import_nanobind() -> ModuleType:
    try:
        return importlib.import_module("nanobind")
    except ImportError as error:
        raise BuildFailed("the package nanobind is missing.") from error


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildFailed("there is no C++ compiler; install g++ or clang++, or name one in CXX.")


def _find_library(name: str) -> Path:
    command = [_find_compiler(), f"-print-file-name={name}"]
    found = Path(subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True).stdout.strip())
    if not found.is_absolute():
        raise BuildFailed(f"the compiler brings no {name}.")
    return found


def _is_sanitized() -> bool:
    return os.environ.get("OCTAVO_SANITIZE") == "1"


def _build_folder() -> str:
    return "build/sanitized" if _is_sanitized() else "build/plain"


def _sanitizer_flags() -> tuple[str, ...]:
    return _SANITIZER_FLAGS if _is_sanitized() else ()


def _link_flags() -> list[str]:
    return ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []


def _run(command: list[str]) -> None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}.") from error
    if finished.returncode:
        errors = [line for line in finished.stderr.splitlines() if "error" in line] or [finished.stderr.strip()]
        raise BuildFailed(f"{command[0]} failed: {errors[0]}")


if __name__ == "__main__":
    main()
