"""Faults of other servers in what strangers can make them do, each by its id."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand
from tests.integration.http_answers import (
    CHAT,
    QUESTION,
    TEXT,
    Answer,
    chat,
    post,
    post_raw,
    refused,
    still_serves,
    streamed_text,
    text,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGE = {"role": "user", "content": "x"}
HUGE: list[Any] = [
    pytest.param({"n": 100_000}, id="n"),
    pytest.param({"best_of": 10**6}, id="best_of"),
    pytest.param({"stop": [f"s{index}" for index in range(100_000)]}, id="many stops"),
    pytest.param({"stop": ["x" * 2**20]}, id="long stop"),
    pytest.param({"stop": "x" * 2**20}, id="long single stop"),
    pytest.param({"logprobs": True, "top_logprobs": 49_152}, id="top_logprobs"),
    pytest.param({"prompt_logprobs": 49_152}, id="prompt_logprobs"),
    pytest.param({"logit_bias": {str(index): 1 for index in range(49_152)}}, id="logit_bias"),
    pytest.param({"messages": [MESSAGE] * 10**5}, id="messages"),
    pytest.param({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10**5}]}, id="parts"),
    pytest.param({"bad_words": [f"w{index}" for index in range(50_000)]}, id="bad_words"),
    pytest.param({"bad_words": ["x" * 2**20]}, id="long bad word"),
    pytest.param({"stop_token_ids": list(range(49_152))}, id="stop_token_ids"),
    pytest.param({"allowed_token_ids": list(range(49_152))}, id="allowed_token_ids"),
    pytest.param({"metadata": {str(index): "x" for index in range(50_000)}}, id="metadata"),
    pytest.param({"user": "x" * 2**20}, id="user"),
    pytest.param(
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]}, id="tools"
    ),
    pytest.param({"model": "x" * 2**20}, id="model"),
    pytest.param({f"field{index}": None for index in range(50_000)}, id="fields"),
]


@pytest.mark.parametrize("fields", HUGE)
async def test_small_bodies_that_ask_for_huge_work_are_refused(stand: Stand, fields: dict[str, Any]) -> None:
    """SEC-01."""
    num_submits = len(stand.engine.submits)

    for path in (CHAT, TEXT):
        if path == TEXT and "messages" in fields:
            continue
        answer = await post(
            stand, path, {"messages": QUESTION} | fields if path == CHAT else {"prompt": "x"} | fields
        )
        assert answer.status in (400, 404)
        # A message is for people to read, whatever it is about.
        assert len(answer.error["message"]) < 1000

    assert len(stand.engine.submits) == num_submits


@pytest.mark.parametrize("prompt", [["x"] * 10**5, [[5]] * 10**5, [[5, "x"]] * 100, [["x"]] * 200, [[[5]]]])
async def test_lists_of_prompts_are_bounded(stand: Stand, prompt: list[Any]) -> None:
    """SEC-01."""
    refused(await text(stand, prompt=prompt), param="prompt")


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
async def test_a_body_of_fifty_megabytes_is_not_read(stand: Stand, path: str) -> None:
    """SEC-01: with its length said first, and without."""
    body = b'{"prompt": "' + b"x" * (50 << 20) + b'"}'

    async def parts() -> Any:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    for data in (body, parts()):
        try:
            answer = await post_raw(stand, path, data)
        except (ConnectionError, OSError):
            # The server has answered and closed while the client still sends; what matters is that it lives.
            continue
        assert answer.status == 413
        assert "error" in answer.json
    await still_serves(stand)


async def test_bad_input_changes_nothing_for_a_stream_beside_it(stand: Stand) -> None:
    """SEC-01."""
    stand.engine.scripts.append(Script(token_ids=stand.encode("one two three four five"), step_delay_seconds=0.1))
    neighbour = asyncio.create_task(chat(stand, stream=True))
    await asyncio.sleep(0.05)

    answers = await asyncio.gather(*(chat(stand, **case.values[0]) for case in HUGE))

    assert {answer.status for answer in answers} <= {400, 404}
    events = (await neighbour).events
    assert streamed_text(events) == "one two three four five"
    assert events[-1] == "[DONE]"


DEEP = '{"a":' * 900 + "1" + "}" * 900
ENDLESS_NUMBER = '{"a":' + "1" * 5000 + "}"


@pytest.mark.parametrize("arguments", [DEEP, ENDLESS_NUMBER], ids=["deep", "endless number"])
async def test_arguments_of_calls_that_no_template_could_write_are_refused(stand: Stand, arguments: str) -> None:
    """As SEC-01, for what is read again behind the schema; ended in an internal error."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [MESSAGE, {"role": "assistant", "tool_calls": [call]}]
    use = f'{{"type": "tool_use", "id": "a", "name": "f", "input": {arguments}}}'
    turns = f'[{json.dumps(MESSAGE)}, {{"role": "assistant", "content": [{use}]}}]'
    body = f'{{"model": "{MODEL_NAME}", "max_tokens": 5, "messages": {turns}}}'

    refused(await chat(stand, messages=messages), param="messages[1].tool_calls[0].function.arguments")
    anthropic = await post_raw(stand, "/v1/messages", body.encode())

    assert anthropic.status == 400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        schema = {"anyOf": [schema, {"type": "object", "properties": {f"a{level}": schema}}]}
    return schema


HOSTILE_SCHEMAS: list[Any] = [
    pytest.param({"type": "string", "pattern": "^(a{1,200}){1,200}$"}, id="counted twice"),
    pytest.param({"type": "string", "pattern": "^([ab]{0,50}){50}$"}, id="counted options"),
    pytest.param({"type": "string", "pattern": "^(a|aa)+$" * 100}, id="ambiguous"),
    pytest.param({"enum": [f"value-{index}" for index in range(50_000)]}, id="large enum"),
    pytest.param(nested(12), id="nested anyOf"),
    pytest.param(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{other}"} for other in range(40)]}
                for index in range(40)
            },
        },
        id="mutual refs",
    ),
    pytest.param({"type": "string", "maxLength": 10**9}, id="long string"),
    pytest.param({"type": "array", "items": {"type": "integer"}, "minItems": 10**7}, id="long array"),
]


@pytest.mark.parametrize("schema", HOSTILE_SCHEMAS)
async def test_hostile_schemas_are_refused_or_built_while_others_are_served(
    stand: Stand, schema: dict[str, Any]
) -> None:
    """SEC-03."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    stand.engine.scripts.clear()

    async with asyncio.timeout(20):
        hostile = [asyncio.create_task(chat(stand, response_format=form)) for _ in range(3)]
        beside = await chat(stand, stream=True)
        async with stand.gateway.http.get("/livez") as alive:
            assert alive.status == 200
        answers = await asyncio.gather(*hostile)
        again = [await chat(stand, response_format=form) for _ in range(10)]

    assert beside.events[-1] == "[DONE]"
    statuses = {answer.status for answer in (*answers, *again)}
    assert len(statuses) == 1
    assert statuses <= {200, 400}
    if statuses == {400}:
        assert answers[0].error["param"] == "response_format.json_schema.schema"
        assert {answer.error["message"] for answer in (*answers, *again)} == {answers[0].error["message"]}


LOOPS = "{% for a in range(500) %}" * 3 + "x" + "{% endfor %}" * 3
TEMPLATES = [LOOPS, '{{ "x"*10**9 }}', "{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}", "plain"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses", "/v1/messages"])
async def test_a_callers_template_is_refused_wherever_it_stands(
    stand: Stand, path: str, template: str, is_nested: bool
) -> None:
    """SEC-04."""
    field = {"chat_template_kwargs": {"chat_template": template}} if is_nested else {"chat_template": template}
    base = {"input": "x"} if path == "/v1/responses" else {"messages": QUESTION}
    answer = await post(stand, path, {**base, **field, **({"max_tokens": 5} if path == "/v1/messages" else {})})

    assert answer.status == 400
    assert "chat_template" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"tokenize": True},
        {"enable_thinking": False},
        {"__class__": 1},
        [1],
        "x",
    ],
)
async def test_arguments_for_the_template_are_refused(stand: Stand, kwargs: Any) -> None:
    """SEC-04."""
    error = refused(await chat(stand, chat_template_kwargs=kwargs))
    assert error["param"].partition(".")[0] == "chat_template_kwargs"
    assert (await chat(stand, chat_template=None, chat_template_kwargs={})).status == 200


async def test_text_that_looks_like_a_template_stays_text(stand: Stand) -> None:
    """SEC-04."""
    plain = await chat(stand, messages=[{"role": "user", "content": "{{ 7 * 7 }}{% raise %}{{ messages }}"}])

    assert plain.status == 200
    prompt = list(stand.engine.submits[-1].prompt_token_ids)
    assert contains(prompt, stand.encode("{{ 7 * 7 }}{% raise %}{{ messages }}"))


def contains(token_ids: list[int], part: list[int]) -> bool:
    return any(token_ids[start : start + len(part)] == part for start in range(len(token_ids)))


async def test_no_address_in_a_request_is_ever_fetched(stand: Stand) -> None:
    """SEC-05."""
    hits: list[str] = []

    async def canary(request: web.Request) -> web.Response:
        hits.append(request.path)
        return web.Response(body=b"secret")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", canary)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    own = f"http://127.0.0.1:{runner.addresses[0][1]}"
    urls = [own, f"{own}/image.png", own.replace("127.0.0.1", "0x7f000001"), own.replace("127.0.0.1", "localhost")]
    urls += ["http://169.254.169.254/", "http://[::1]/", "file:///etc/hostname", "data:image/png;base64,AAAA", ""]
    messages: set[str] = set()

    for url in urls:
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "file", "file": {"file_id": url}},
            {"type": "video_url", "video_url": {"url": url}},
        ]
        for part in parts:
            content = [{"type": "text", "text": "What is this?"}, part]
            error = refused(await chat(stand, messages=[{"role": "user", "content": content}]))
            assert error["param"] == "messages[0].content[1].type"
            messages.add(error["message"])
        response = await post(stand, "/v1/responses", {"input": [{"role": "user", "content": [parts[2]]}]})
        source = {"type": "image", "source": {"type": "url", "url": url}}
        message = [{"role": "user", "content": [source]}]
        anthropic = await post(stand, "/v1/messages", {"max_tokens": 5, "messages": message})
        assert (response.status, anthropic.status) == (400, 400)
    await runner.cleanup()

    assert hits == []
    # Whether anything is there does not show.
    assert len(messages) == 1
    await still_serves(stand)


PATHS = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "C:\\x",
    "a\u0000b",
    "x" * 10_240,
    "smollm2-135m-instruct/../x",
    "smollm2-135m-instruct\u0000",
    " smollm2-135m-instruct",
    "SMOLLM2-135M-INSTRUCT",
    "sha256:../../x",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("name", PATHS)
async def test_a_name_that_is_a_path_is_a_model_that_is_not_there(stand: Stand, name: str) -> None:
    """SEC-10."""
    answers = [
        await chat(stand, model=name),
        await chat(stand, model=name, stream=True),
        await text(stand, model=name),
        await post(stand, "/v1/responses", {"model": name, "input": "x"}),
        await post(stand, "/tokenize", {"model": name, "prompt": "x"}),
        # A longer line is no request at all.
        await get_model(stand, name[:4096]),
    ]
    anthropic = await post(stand, "/v1/messages", {"model": name, "max_tokens": 5, "messages": QUESTION})
    record = await stand.telemetry.wait_for(answers[0].request_id)

    for answer in answers:
        error = refused(answer, status=404)
        assert error["code"] == "model_not_found"
        assert len(error["message"]) < 200
        assert not any(place in error["message"] for place in ("site-packages", "No such file", "/tmp", "/root"))
    assert anthropic.status == 404
    assert len(record.model_name) <= 64
    assert record.model_name.isprintable()
    # No name of a stranger is a label.
    async with stand.gateway.http.get("/metrics") as metrics:
        assert name[:20] not in await metrics.text()


async def get_model(stand: Stand, name: str) -> Answer:
    from urllib.parse import quote

    url = URL(f"{stand.gateway.base_url}/v1/models/{quote(name, safe='')}", encoded=True)
    async with stand.gateway.http.get(url) as response:
        return Answer(response.status, dict(response.headers), await response.read())


@pytest.mark.parametrize("name", ["", None, 5, True, ["smollm2-135m-instruct"], {"id": "x"}])
async def test_a_model_that_is_no_name_is_refused(stand: Stand, name: Any) -> None:
    """SEC-10."""
    for answer in (await chat(stand, model=name), await text(stand, model=name)):
        assert answer.status in (400, 404)
        assert answer.error["param"] == "model"


@pytest.mark.parametrize("field", ["lora", "lora_path", "adapter", "lora_request", "guided_decoding_backend"])
async def test_names_of_adapters_are_refused_without_their_text(stand: Stand, field: str) -> None:
    """SEC-10."""
    for value in ("../../etc/passwd", "/etc/passwd", {"path": "/etc/passwd"}):
        error = refused(await chat(stand, **{field: value}), param=field)
        assert "passwd" not in error["message"]


async def test_routes_that_climb_are_not_there(stand: Stand) -> None:
    """SEC-10."""
    for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/static/../../etc/passwd"):
        async with stand.gateway.http.get(URL(f"{stand.gateway.base_url}{path}", encoded=True)) as response:
            body = json.loads(await response.read())
        assert response.status == 404
        assert "root:" not in json.dumps(body)


async def test_a_grammar_in_gbnf_is_bounded_before_it_is_converted(stand: Stand) -> None:
    """As SEC-03: the converter is Python, and held the event loop for half a second."""
    grammar = "root ::= " + "a|" * 100_000 + "a"

    error = refused(await chat(stand, structured_outputs={"grammar": grammar}))

    assert error["param"] == "structured_outputs.grammar"
    assert "16384" in error["message"]


FOREIGN_NAMES = ["example.com", "example.com:8000", "127.0.0.1.nip.io", "localhost.example.com", "a.b."]
OWN_NAMES = ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "a.localhost", "x", "h.local"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/livez"])
async def test_a_server_without_keys_answers_no_site_whose_name_points_here(stand: Stand, path: str) -> None:
    """ollama/ollama, CVE-2024-28224: DNS rebinding."""
    for name in (*FOREIGN_NAMES, *OWN_NAMES):
        async with stand.gateway.http.get(path, headers={"Host": name}) as response:
            body = await response.read()

        assert response.status == (403 if name in FOREIGN_NAMES else 200), name
        if name in FOREIGN_NAMES:
            assert json.loads(body)["error"]["code"] == "permission_denied"


async def test_a_body_in_a_coding_of_the_transfer_is_refused(stand: Stand) -> None:
    """As gzip bombs in 'Content-Encoding': what is unknown must not be taken for the body itself."""
    body = json.dumps({"model": MODEL_NAME, "messages": QUESTION}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    coded = head.encode() + b"Transfer-Encoding: gzip, chunked\r\n\r\n"
    url = URL(stand.gateway.base_url)
    assert url.host is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)

    writer.write(coded + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 415 ")
