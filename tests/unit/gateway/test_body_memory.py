"""That a long body finds its memory there, in processes of their own: it is the whole process that is told."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.patience import PATIENCE_SECONDS

# Reads long bodies, then holds forty texts at once, and tells what all that took from the system.
_READER = """
import asyncio, ctypes, json, resource, sys
from pathlib import Path
from services.gateway.body_memory import BodyMemory
from services.gateway.json_body import JsonBody

TOKENS = b'{"prompt":[' + b"12345," * 499_999 + b"12345]}"
TEXT = b'{"prompt":"' + b"the quick brown fox " * 200_000 + b'"}'

def read(raw):
    body = JsonBody()
    for start in range(0, len(raw), 2**18):
        body.add(raw[start : start + 2**18])
    return body.parse()

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def num_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def num_faults_of(raw):
    before = num_faults()
    read(raw)
    return num_faults() - before

async def taken_back(memory):
    task = asyncio.create_task(memory.run())
    while num_resident_bytes() - before < taken - 4 * 2**20:
        await asyncio.sleep(0.05)
    task.cancel()

ctypes.CDLL(None).malloc_trim(0)
before = num_resident_bytes()
has_memory = sys.argv[1] == "with"
memory = BodyMemory(4 * 2**20) if has_memory else None
if has_memory:
    memory.take()
taken = num_resident_bytes() - before
# What is only free goes now.
ctypes.CDLL(None).malloc_trim(0)
if has_memory:
    memory.lend()
faults = [num_faults_of(raw) for raw in (TEXT, TOKENS, TEXT, TOKENS)]
many = [read(TEXT) for _ in range(40)]
peak = num_resident_bytes() - before
del many
ctypes.CDLL(None).malloc_trim(0)
left = num_resident_bytes() - before
if has_memory:
    asyncio.run(asyncio.wait_for(taken_back(memory), float(sys.argv[2])))
print(json.dumps({"taken": taken, "faults": faults, "peak": peak, "left": left}))
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process told of itself: bytes, and for each body the pages that it took from the system."""

    taken: int
    faults: list[int]
    peak: int
    left: int


def measure(with_or_without: str) -> Measured:
    command = [sys.executable, "-c", _READER, with_or_without, str(PATIENCE_SECONDS)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return Measured(**json.loads(process.stdout))


@pytest.fixture(scope="module")
def measured() -> Measured:
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("needs glibc, whose allocator can be told what to keep")
    return measure("with")


def test_a_long_body_takes_no_pages_from_the_system(measured: Measured) -> None:
    without = measure("without")

    # A text of 4 MB has a thousand pages as a body and a thousand more as a string.
    assert min(without.faults) > 1_500
    assert max(measured.faults) < 300


def test_its_memory_follows_from_the_largest_body(measured: Measured) -> None:
    assert 28e6 < measured.taken < 40e6


def test_what_many_bodies_took_at_once_is_given_back(measured: Measured) -> None:
    """And the one's memory, which went with it here, is had again: else the process would not have ended well."""
    assert measured.peak > 150e6
    assert measured.left < measured.taken
