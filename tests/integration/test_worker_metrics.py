"""What a worker says of itself while it serves the real model: its log at loading, and /metrics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from services.supervisor.ports import claim_port
from tests.integration.octavo import RunningOctavo
from tests.unit.worker.kernels.native_models import needs_kernels

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]

MODEL = "smollm2-135m-instruct"
NUM_OUTPUT_TOKENS = 12
# Of SmolLM2-135M: layers, hidden size, query and KV heads, head size, feed-forward size, vocabulary.
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 30, 576, 9, 3, 64, 1_536, 49_152


def samples_of(port: int) -> dict[tuple[str, str], float]:
    """Return the worker's samples by name and kind of step."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {
            (sample.name, sample.labels.get("kind", "")): sample.value
            for family in families
            for sample in family.samples
            if "le" not in sample.labels
        }


def events_of(octavo: RunningOctavo, name: str) -> list[dict[str, object]]:
    lines = (octavo.data_dir / "logs" / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


@needs_kernels
def test_a_worker_says_what_it_takes_and_counts_what_it_does(running_octavo: StartOctavo) -> None:
    port = claim_port("127.0.0.1", 0)
    with running_octavo("--set", f"worker.metrics_port={port}") as octavo:
        octavo.wait_for_stderr("memory in use", timeout_seconds=60)
        events = {str(event["event"]): event for event in events_of(octavo, "worker-0")}
        before = samples_of(port)
        client = OpenAI(base_url=f"{octavo.base_url}/v1", api_key="none", max_retries=0)
        completion = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count to a hundred. " * 20}],
            max_tokens=NUM_OUTPUT_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        samples = samples_of(port)

    assert "memory expected" in events
    assert "memory in use" in events
    assert events["memory in use"]["huge_pages"]
    assert any(event.startswith(f"loading {MODEL}: ") for event in events)
    # What was run before the first request is not counted as served.
    assert before["octavo_worker_tokens_total", ""] == 0
    assert completion.usage is not None
    num_prompt = completion.usage.prompt_tokens
    # The last output token is never computed.
    num_computed = num_prompt + NUM_OUTPUT_TOKENS - 1
    assert samples["octavo_worker_tokens_total", ""] == num_computed
    assert samples["octavo_worker_step_seconds_count", "decode"] == NUM_OUTPUT_TOKENS - 1
    assert samples["octavo_worker_step_seconds_count", "prefill"] >= 1
    per_layer = HIDDEN * HEAD * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER
    num_attended = num_computed * (num_computed + 1) // 2
    operations = 2 * LAYERS * (num_computed * per_layer + 2 * num_attended * HEADS * HEAD)
    operations += 2 * NUM_OUTPUT_TOKENS * VOCABULARY * HIDDEN
    assert operations == sum(
        samples.get(("octavo_worker_model_operations_total", kind), 0) for kind in ("decode", "prefill", "mixed")
    )
    weight_bytes = 2 * (LAYERS * per_layer + VOCABULARY * HIDDEN)
    contexts = sum(range(num_prompt + 1, num_computed + 1))
    moved = (NUM_OUTPUT_TOKENS - 1) * weight_bytes + contexts * LAYERS * 2 * KV_HEADS * HEAD * 2
    assert abs(samples["octavo_worker_memory_bytes_total", "decode"] / moved - 1) < 0.002  # Norms are counted, too.
    for name in ("model_flops_utilization", "memory_bandwidth_utilization"):
        assert samples[f"octavo_worker_{name}", "decode"] > 0
    peak = samples["octavo_worker_peak_operations_per_second", ""]
    seconds = samples["octavo_worker_step_seconds_sum", "prefill"]
    if samples["octavo_worker_step_seconds_count", "prefill"] == 1:
        share = samples["octavo_worker_model_operations_total", "prefill"] / seconds / peak
        assert abs(samples["octavo_worker_model_flops_utilization", "prefill"] / share - 1) < 1e-6
    assert samples["octavo_worker_idle_gap_seconds_count", ""] >= NUM_OUTPUT_TOKENS - 1
