"""Clients that are not of our environment: OpenAI's for Node, langchain-openai, litellm and ``llm``.

Each does a plain chat, a streamed one, a call of a tool with its answer, and an answer held to a JSON schema,
against a real gateway process. An engine of scripts says what the model would say, in the order of the questions.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand, open_stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CHECKS = REPOSITORY / "tests" / "clients"
# Made by `make install-clients`.
PYTHON = REPOSITORY / "build" / "clients" / "venv" / "bin" / "python"
NODE_MODULES = REPOSITORY / "build" / "clients" / "node"
TIMEOUT_SECONDS = 120.0
TEXT = "The primes are 2, 3 and 5. 😀"
PERSON = {"name": "Ann", "age": 30}
CALL = f'<tool_call>\n{{"name": "describe", "arguments": {json.dumps(PERSON)}}}\n</tool_call>'
CALLED = {"name": "describe", "arguments": PERSON}
EOS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("clients")) as stand:
        yield stand


def say(stand: Stand, *texts: str) -> None:
    """Let the engine answer the next requests with these texts, and fail what comes after them."""
    stand.engine.scripts.clear()
    stand.engine.scripts.extend(
        Script(token_ids=[*stand.encode(text), EOS], ends_with_stop_token=True) for text in texts
    )


async def output_of(*command: str, environ: dict[str, str] | None = None, folder: Path = REPOSITORY) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, **(environ or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, errors.decode()[-4_000:]
    return output.decode()


async def results_of(*command: str, environ: dict[str, str] | None = None) -> Any:
    return json.loads((await output_of(*command, environ=environ)).splitlines()[-1])


async def node_checks() -> Path:
    """Return the script beside the client, which is installed by its lock file the first time."""
    NODE_MODULES.mkdir(parents=True, exist_ok=True)
    lock = CHECKS / "node" / "package-lock.json"
    installed = NODE_MODULES / "package-lock.json"
    if not (NODE_MODULES / "node_modules").is_dir() or installed.read_bytes() != lock.read_bytes():
        for name in ("package.json", "package-lock.json"):
            shutil.copy(CHECKS / "node" / name, NODE_MODULES / name)
        await output_of("npm", "ci", "--no-audit", "--no-fund", folder=NODE_MODULES)
    return Path(shutil.copy(CHECKS / "node" / "checks.mjs", NODE_MODULES / "checks.mjs"))


@pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="needs node and npm")
async def test_openais_client_for_node(stand: Stand) -> None:
    say(stand, TEXT, TEXT, TEXT, CALL, CALL, TEXT, json.dumps(PERSON), *[TEXT] * 4, json.dumps(PERSON))

    found = await results_of("node", str(await node_checks()), stand.gateway.base_url, MODEL_NAME)

    assert found == {
        "plain": TEXT,
        "streamed": TEXT,
        "helped": TEXT,
        "tool": CALLED,
        "streamedTool": CALLED,
        "answered": TEXT,
        "json": PERSON,
        "completion": TEXT,
        "streamedCompletion": TEXT,
        "response": TEXT,
        "streamedResponse": TEXT,
        "responseJson": PERSON,
        "models": [MODEL_NAME],
        "model": MODEL_NAME,
        "refused": {"status": 404, "code": "model_not_found", "isNotFound": True},
    }


@pytest.mark.slow
@pytest.mark.parametrize("client", ["langchain", "litellm", "llm"])
async def test_clients_for_python(stand: Stand, client: str, tmp_path: Path) -> None:
    assert PYTHON.exists(), "the clients are not installed: run `make install-clients`"
    say(stand, TEXT, TEXT, CALL, TEXT, json.dumps(PERSON))

    found = await results_of(
        str(PYTHON),
        str(CHECKS / f"{client}_checks.py"),
        stand.gateway.base_url,
        MODEL_NAME,
        environ={
            # Nothing of the user's is read, and nobody is told of the test.
            "LLM_USER_PATH": str(tmp_path),
            "HOME": str(tmp_path),
            "LANGCHAIN_TRACING_V2": "false",
            # The package of our model is a plugin of `llm`, and what it needs as one is not installed.
            "LLM_LOAD_PLUGINS": "",
        },
    )

    assert found == {"plain": TEXT, "streamed": TEXT, "tool": CALLED, "answered": TEXT, "json": PERSON}
