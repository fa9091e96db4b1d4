from __future__ import annotations

import pytest

from services.worker.config import (
    KernelChoice,
    Quantization,
    RunnerKind,
    WeightsType,
    WorkerConfig,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2 GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1000", 1_000),
        ("64kib", 65_536),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "5 parsecs", "-1MiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_the_cache_size_may_be_given_in_one_way_only() -> None:
    assert WorkerConfig(kv_cache_memory="1KiB").requested_kv_cache_bytes == 1_024
    assert WorkerConfig(kv_cache_memory_bytes=5).requested_kv_cache_bytes == 5
    assert WorkerConfig().requested_kv_cache_bytes is None
    with pytest.raises(ValueError, match="not both"):
        WorkerConfig(kv_cache_memory="1KiB", kv_cache_memory_bytes=5)


def test_weights_are_quantized_only_where_native_kernels_serve() -> None:
    assert WorkerConfig(quantization=Quantization.INT8).quantization is Quantization.INT8
    with pytest.raises(ValueError, match="int8 needs dtype bfloat16, not float32"):
        WorkerConfig(quantization=Quantization.INT8, dtype=WeightsType.FLOAT32)
    with pytest.raises(ValueError, match="int8 needs the native kernels; leave kernels at auto"):
        WorkerConfig(quantization=Quantization.INT8, kernels=KernelChoice.TORCH)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_the_cache_cannot_take_all_memory(fraction: float) -> None:
    with pytest.raises(ValueError, match="kv_cache_memory_fraction"):
        WorkerConfig(kv_cache_memory_fraction=fraction)


def test_the_stub_emits_ids_of_its_vocabulary_only() -> None:
    with pytest.raises(ValueError, match="inside its vocabulary"):
        WorkerConfig(runner=RunnerKind.STUB, stub_vocab_size=100, stub_first_token_id=50, stub_num_token_ids=51)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_threads", -1), ("kv_cache_memory_bytes", 0), ("drain_grace_seconds", -1.0)],
)
def test_numbers_that_no_worker_could_run_with_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        WorkerConfig(**{name: value})  # type: ignore[arg-type]  # The dataclass checks the values.
