"""Measure what a gateway process costs and adds, between a stub engine and a light client; one JSON object is last.

For each number of streams: tokens that reach the client for each CPU-second of the gateway (from /proc, user and
system), the gaps between them, and the time to first token of further requests meanwhile; the stub's own is
nothing. Then the time to first token at a steady rate of requests, and how fast bad requests are answered and what
they do to others. ``--against FOLDER`` measures another checkout's gateway too, in turns, and gives the ratios;
``--memory N`` measures only how memory grows over so many requests.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.bad_requests import BadRequest, bad_requests
from scripts.octavo_under_test import REPOSITORY, cpu_model
from scripts.sse_load import Load, Stream, open_load, request_bytes

_MODEL: Final = "smollm2-135m-instruct"
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_START_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = 30.0
_RAMP_REQUESTS_PER_SECOND: Final = 250.0
_PROBES_PER_SECOND: Final = 20.0
_NUM_NEIGHBOURS: Final = 64
_WITHOUT_END: Final = 8_000  # tokens, more than any measurement takes
_MEMORY_STREAMS: Final = 32
_NUM_TTFT_TURNS: Final = 6
_AFTER_ANSWER_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway process under test."""

    pid: int
    port: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

    @property
    def resident_bytes(self) -> int:
        """Its memory now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 512, 2_000], help="streams open at once")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    parser.add_argument("--requests-per-second", type=float, default=200.0, help="for the time to first token")
    parser.add_argument("--against", default="", help="folder of another checkout to measure in the same run")
    parser.add_argument("--only", nargs="*", default=["relay", "ttft", "bad_input"], help="parts to measure")
    parser.add_argument("--bad-answers", type=int, default=5, help="times that each bad request is sent")
    parser.add_argument("--memory", type=int, default=0, help="only send so many requests and watch memory")
    parser.add_argument("--pin", action="store_true", help="gateways on the first core, all else on the others")
    parser.add_argument("--profile", default="", help="write a cProfile of the gateway to this file")
    options = parser.parse_args()
    _allow_many_connections()
    # A round of this process's collector stops the client for 10 to 40 ms, as if the gateway had been late.
    gc.disable()
    gateway_cores = _divide_cores() if options.pin else None
    with running_stub(options.rate) as engine_address:
        if options.memory:
            result = _measure_memory(engine_address, options, gateway_cores)
        else:
            result = _measure_all(engine_address, options, gateway_cores)
    machine = {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "gateway", "options": vars(options), "machine": machine, **result}))


def _divide_cores() -> set[int]:
    """Leave the first core to gateways, which begin later, and keep to the others with all else; returns it.

    A process that is woken by bytes may otherwise take the place of who sent them, which looks like the gateway's
    own time.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [first])
    return {first}


def _measure_all(
    engine_address: str, options: argparse.Namespace, gateway_cores: set[int] | None
) -> dict[str, Any]:
    with ExitStack() as stack:
        gateway = stack.enter_context(
            running_gateway(engine_address, REPOSITORY, profile=options.profile, cores=gateway_cores)
        )
        other = None
        if options.against:
            other = stack.enter_context(running_gateway(engine_address, Path(options.against), cores=gateway_cores))
        result: dict[str, Any] = {"relay": [], "ttft": {}, "bad_input": {}}
        against: dict[str, Any] = {"relay": [], "ttft": {}, "bad_input": {}, "ratios": []}
        for num_streams in options.streams if "relay" in options.only else ():
            result["relay"].append(_measure_relay(gateway, num_streams, options))
            if other is not None:
                against["relay"].append(_measure_relay(other, num_streams, options))
                mine, others = (one["relay"][-1]["tokens_per_s_per_core"] for one in (result, against))
                against["ratios"].append(round(mine / others, 3))
        if "ttft" in options.only:
            gateways = [gateway] if other is None else [gateway, other]
            result["ttft"], *others_ttft = _measure_ttfts(gateways, options)
            against["ttft"] = others_ttft[0] if others_ttft else {}
        if "bad_input" in options.only:
            result["bad_input"] = _measure_bad_input(gateway, options)
            against["bad_input"] = {} if other is None else _measure_bad_input(other, options)
        return result if other is None else result | {"against": against}


def _measure_relay(gateway: Gateway, num_streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure streams that all run: first by themselves, then beside new requests."""
    with open_load("127.0.0.1", gateway.port) as load:
        _begin_streams(load, num_streams)
        load.take_counts()
        cpu_before, started_at = gateway.cpu_seconds, time.perf_counter()
        load.run_until(started_at + options.seconds)
        duration_seconds, cpu_seconds = time.perf_counter() - started_at, gateway.cpu_seconds - cpu_before
        counts = load.take_counts()
        assert len(load.active) == num_streams, "streams ended while they were measured"
        ttfts = _send_steadily(load, _PROBES_PER_SECOND, options.seconds)
    measured = {
        "streams": num_streams,
        "tokens_per_s_per_core": round(counts.num_tokens / cpu_seconds),
        "cpu_seconds_per_1000_tokens": round(1_000 * cpu_seconds / counts.num_tokens, 5),
        "added_ttft_p50_ms": _milliseconds(ttfts, 50),
        "added_ttft_p99_ms": _milliseconds(ttfts, 99),
        "num_probes": len(ttfts),
        **_gaps(counts.gaps),
        "num_tokens": counts.num_tokens,
        "num_events": counts.num_events,
        "num_bytes": counts.num_bytes,
        "cpu_seconds": round(cpu_seconds, 2),
        "duration_seconds": round(duration_seconds, 3),
    }
    print(json.dumps(measured), file=sys.stderr, flush=True)
    return measured


class _TtftMeasurement:
    """Requests of two tokens that come to one gateway at a steady rate, whatever became of those before."""

    def __init__(self, gateway: Gateway, load: Load, rate: float) -> None:
        self._gateway, self._load, self._rate = gateway, load, rate
        self._turns: list[list[float]] = []
        self._cpu_seconds = 0.0
        _send_steadily(load, rate, 1.0)

    def take_turn(self, seconds: float) -> None:
        """Measure for so long."""
        cpu_before = self._gateway.cpu_seconds
        self._turns.append(_send_steadily(self._load, self._rate, seconds))
        self._cpu_seconds += self._gateway.cpu_seconds - cpu_before

    def result(self) -> dict[str, Any]:
        """Return what all turns have shown; a turn in which the machine did something else shows by itself."""
        ttfts = [seconds for turn in self._turns for seconds in turn]
        return {
            "requests_per_second": self._rate,
            "added_ttft_p50_ms": _milliseconds(ttfts, 50),
            "added_ttft_p99_ms": _milliseconds(ttfts, 99),
            "added_ttft_p99_ms_of_turns": [_milliseconds(turn, 99) for turn in self._turns],
            "num_requests": len(ttfts),
            "cpu_seconds": round(self._cpu_seconds, 2),
            "cpu_seconds_per_request": round(self._cpu_seconds / len(ttfts), 6),
        }


def _measure_ttfts(gateways: Sequence[Gateway], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the time to first token of each gateway, in turns."""
    with ExitStack() as stack:
        measurements = [
            _TtftMeasurement(
                gateway, stack.enter_context(open_load("127.0.0.1", gateway.port)), options.requests_per_second
            )
            for gateway in gateways
        ]
        for turn in range(_NUM_TTFT_TURNS):
            for measurement in measurements if turn % 2 == 0 else reversed(measurements):
                measurement.take_turn(options.seconds / _NUM_TTFT_TURNS)
        return [measurement.result() for measurement in measurements]


def _measure_bad_input(gateway: Gateway, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how fast each bad request is answered, and the gaps of good streams meanwhile.

    The same bytes sent to a process that only reads them (``control``) tell what they cost on this machine whoever
    takes them: client, kernel and stub share its cores with the gateway.
    """
    # Made beforehand: what keeps this process busy would look like a gap.
    requests = list(bad_requests(_MODEL))
    with _running_sink() as sink, open_load("127.0.0.1", gateway.port) as load:
        _begin_streams(load, _NUM_NEIGHBOURS)
        load.take_counts()
        load.run_until(time.perf_counter() + options.seconds)
        undisturbed = _gaps(load.take_counts().gaps)
        answers = {
            bad.name: {
                "num_bytes": len(bad.raw),
                **_send_bad(load, bad, options.bad_answers),
                "control": _send_bad(load, bad, options.bad_answers, elsewhere=sink),
            }
            for bad in requests
        }
        return {"neighbours": _NUM_NEIGHBOURS, "undisturbed": undisturbed, "answers": answers}


def _send_bad(
    load: Load, bad: BadRequest, num_answers: int, *, elsewhere: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Send a bad request some times; neighbours' gaps are those from each one until a while after its answer."""
    answer_ms, gap_p99_ms, gaps = list[float](), list[float](), list[float]()
    for _ in range(num_answers):
        load.take_counts()
        stream = load.begin(bad.raw, elsewhere=elsewhere)
        load.run_until(time.perf_counter() + _ANSWER_SECONDS, functools.partial(_has_ended, stream))
        assert stream.ended_at is not None, f"{bad.name} was not answered"
        answer_ms.append(round(1e3 * (stream.ended_at - stream.sent_at), 2))
        load.run_until(time.perf_counter() + _AFTER_ANSWER_SECONDS)
        counts = load.take_counts()
        gap_p99_ms.append(_milliseconds(counts.gaps, 99))
        gaps += counts.gaps
    return {
        "status": stream.status,
        "answer_median_ms": statistics.median(answer_ms),
        "gap_p99_median_ms": statistics.median(gap_p99_ms),
        "gap_p99_max_ms": max(gap_p99_ms),
        "answer_ms": answer_ms,
        "gap_p99_ms": gap_p99_ms,
        "neighbours": _gaps(gaps),
    }


def _has_ended(stream: Stream) -> bool:
    return stream.ended_at is not None


def _measure_memory(
    engine_address: str, options: argparse.Namespace, gateway_cores: set[int] | None
) -> dict[str, Any]:
    """Send many short requests, so many at a time, and read memory after each tenth of them."""
    samples = []
    with (
        running_gateway(engine_address, REPOSITORY, cores=gateway_cores) as gateway,
        open_load("127.0.0.1", gateway.port) as load,
    ):
        started_at, num_ended = time.perf_counter(), 0
        numbers = iter(range(options.memory))

        def count(stream: Stream) -> None:
            nonlocal num_ended
            num_ended += 1

        load.on_end = count
        for tenth in range(1, 11):
            target = options.memory * tenth // 10
            while num_ended < target:
                while len(load.active) < _MEMORY_STREAMS and (number := next(numbers, None)) is not None:
                    load.begin(_request(number, 1))
                # The last ones are waited for too, when there are none to send.
                is_done = functools.partial(_has_fewer_than, load, len(load.active))
                load.run_until(time.perf_counter() + _ANSWER_SECONDS, is_done)
            load.take_counts()
            samples.append({"num_requests": num_ended, "resident_bytes": gateway.resident_bytes})
            print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
        duration_seconds, cpu_seconds = time.perf_counter() - started_at, gateway.cpu_seconds
    growth = samples[-1]["resident_bytes"] - samples[0]["resident_bytes"]
    return {
        "memory": samples,
        "growth_bytes_after_the_first_tenth": growth,
        "duration_seconds": round(duration_seconds, 3),
        "cpu_seconds": round(cpu_seconds, 2),
    }


def _has_fewer_than(load: Load, num_streams: int) -> bool:
    return len(load.active) < num_streams


def _begin_streams(load: Load, num_streams: int) -> None:
    """Start streams at a bearable rate and wait until all have a token."""
    streams = []
    for number in range(num_streams):
        streams.append(load.begin(_request(number, _WITHOUT_END)))
        load.run_until(time.perf_counter() + 1 / _RAMP_REQUESTS_PER_SECOND)
    deadline = time.perf_counter() + _ANSWER_SECONDS
    load.run_until(deadline, lambda: all(stream.first_at is not None for stream in streams))
    load.run_until(time.perf_counter() + 1.0)
    assert all(stream.status == 200 for stream in streams), {stream.status for stream in streams}


def _send_steadily(load: Load, rate: float, seconds: float) -> list[float]:
    """Send requests of two tokens at a rate; returns their times to first token in seconds."""
    sent: list[Stream] = []
    ttfts: list[float] = []

    def end(stream: Stream) -> None:
        assert stream.status == 200, stream.head
        if stream.first_at is not None:
            ttfts.append(stream.first_at - stream.sent_at)

    load.on_end = end
    num_running = len(load.active)
    started_at = time.perf_counter()
    for number in range(round(rate * seconds)):
        load.run_until(started_at + number / rate)
        sent.append(load.begin(_request(number, 2)))
    load.run_until(time.perf_counter() + _ANSWER_SECONDS, lambda: len(load.active) <= num_running)
    return ttfts


def _request(number: int, max_tokens: int) -> bytes:
    body = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": f"{number}. Tell a story about the number {number}."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    return request_bytes(json.dumps(body).encode())


def _gaps(gaps: Sequence[float]) -> dict[str, float]:
    return {
        "gap_p50_ms": _milliseconds(gaps, 50),
        "gap_p99_ms": _milliseconds(gaps, 99),
        "gap_max_ms": _milliseconds(gaps, 100),
    }


def _milliseconds(seconds: Sequence[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(np.asarray(seconds), percentile)), 3)


@contextmanager
def running_stub(rate: float) -> Iterator[str]:
    """Run the stub engine; gives its address."""
    command = [sys.executable, "-m", "scripts.stub_generation_engine", "--rate", str(rate)]
    with _running(command, REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "asked for a pipe"
        yield json.loads(process.stdout.readline())["address"]


@contextmanager
def _running_sink() -> Iterator[tuple[str, int]]:
    """Run what only reads requests; gives its address."""
    with _running([sys.executable, "-m", "scripts.byte_sink"], REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "asked for a pipe"
        yield "127.0.0.1", json.loads(process.stdout.readline())["port"]


@contextmanager
def running_gateway(
    engine_address: str, code: Path, *, profile: str = "", cores: set[int] | None = None
) -> Iterator[Gateway]:
    """Run the gateway of a checkout, on these cores alone if any are given; gives it when it is ready."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        command = [sys.executable, *(("-m", "cProfile", "-o", profile) if profile else ())]
        command += ["-m", "services.cli", "gateway", "--port", "0", "--data-dir", folder]
        command += ["--engine-addresses", engine_address, "--max-concurrent-requests", "8192"]
        with _running(command, code, stderr=subprocess.PIPE) as process:
            if cores is not None:
                # It has not begun to start threads, which inherit this.
                os.sched_setaffinity(process.pid, cores)
            assert process.stderr is not None, "asked for a pipe"
            port = _port_from_log(process.stderr)
            # Nobody reads the log any further; a full pipe would stall the gateway.
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
            _wait_ready(port)
            yield Gateway(process.pid, port)
        drain.wait()


@contextmanager
def _running(command: Sequence[str], code: Path, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(code)}
    with subprocess.Popen(command, cwd=code, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _port_from_log(lines: Any) -> int:
    for line in lines:
        if b'"gateway listens"' in line:
            return int(json.loads(line)["port"])
    sys.exit("The gateway did not start.")


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    sys.exit("The gateway did not become ready.")


def _allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
