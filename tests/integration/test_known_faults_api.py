"""Faults of other servers in what an API takes and answers, each by its id among the known ones, over HTTP."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from libs.text import IncrementalDetokenizer
from tests.fakes.fake_generation_engine import Script, alternatives_of, logprob_of
from tests.integration.gateway_process import Stand, open_stand
from tests.integration.http_answers import (
    CHAT,
    QUESTION,
    TEXT,
    chat,
    chat_parts,
    post,
    post_raw,
    refused,
    still_serves,
    streamed_text,
    text,
)
from tests.unit.text.small_models import tokenizer_json, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAN, INFINITY = float("nan"), float("inf")
CONTEXT = 8192
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": QUESTION}, TEXT: {"prompt": "Say hi."}}
WRONG: dict[str, list[Any]] = {
    "temperature": [NAN, INFINITY, -INFINITY, -1, -1e-9, 1e6, 2.01, "0.5", True, [1], {}],
    "top_p": [-1, 0, 0.0, -0.0, 1.5, NAN, "1", False],
    "top_k": [0.01, 1.0, -2, 10**12, 10**30, NAN, "5", True],
    "min_p": [-0.1, 2, NAN, "0", True],
    "repetition_penalty": [0, -1, 1e9, NAN, INFINITY, "1"],
    "presence_penalty": [1e9, -2.1, NAN, "0"],
    "frequency_penalty": [1e9, -2.1, NAN],
    "seed": [2**63, -(2**63) - 1, 1.5, "7", True],
    "n": [0, -1, 1.5, "2", True, 129],
    "min_tokens": [-1, 5, 1.5, True],
}
ABSURD = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_absurd_sampling_values_are_refused_by_name(stand: Stand, path: str) -> None:
    """API-04."""
    num_submits = len(stand.engine.submits)

    for name, value in ABSURD:
        answer = await post(stand, path, {**PROMPTS[path], "max_tokens": 4, name: value})
        error = refused(answer)
        is_json = not (isinstance(value, float) and value != value) and value not in (INFINITY, -INFINITY)
        assert error["param"] == (name if is_json else None), (name, value, error)
    for name in ("temperature", "top_p", "min_p"):
        for spelled in ("NaN", "nan", "Infinity", "-inf"):
            refused(await post(stand, path, {**PROMPTS[path], name: spelled}), param=name)

    assert len(stand.engine.submits) == num_submits
    await still_serves(stand)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-4, 1e-30, 5e-324])
async def test_a_tiny_temperature_is_greedy(stand: Stand, temperature: float) -> None:
    """API-04."""
    answer = await chat(stand, temperature=temperature, max_tokens=4)

    assert answer.status == 200
    assert stand.engine.submits[-1].sampling_params.temperature == 0.0
    assert answer.json["choices"][0]["message"]["content"]


LOGPROBS = [
    ({"logprobs": True}, 0),
    ({"logprobs": True, "top_logprobs": 0}, 0),
    ({"logprobs": True, "top_logprobs": None}, 0),
    ({"logprobs": True, "top_logprobs": 2}, 2),
    ({"logprobs": True, "top_logprobs": 20}, 20),
]


@pytest.mark.parametrize(("fields", "count"), LOGPROBS)
@pytest.mark.parametrize("tokens_per_step", [1, 2])
async def test_every_token_of_a_chat_has_its_log_probability(
    stand: Stand, fields: dict[str, Any], count: int, tokens_per_step: int
) -> None:
    """API-06."""
    token_ids = stand.encode("one two three four")
    stand.engine.default_script = Script(token_ids=token_ids, tokens_per_step=tokens_per_step)

    whole = (await chat(stand, max_tokens=3, **fields)).json["choices"][0]["logprobs"]["content"]
    events = (await chat(stand, max_tokens=3, stream=True, **fields)).events

    assert len(whole) == 3
    for token_id, entry in zip(token_ids, whole, strict=False):
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == logprob_of(token_id) <= 0
        assert [top["logprob"] for top in entry["top_logprobs"]] == [
            logprob for _, logprob in alternatives_of(token_id, count)
        ]
    streamed = [part["logprobs"]["content"] for part in chat_parts(events) if part["logprobs"]]
    assert list(itertools.chain.from_iterable(streamed)) == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "top_logprobs": 2},
        {"top_logprobs": 2},
        {"logprobs": None, "top_logprobs": 1},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": True, "top_logprobs": 1.0},
        {"logprobs": True, "top_logprobs": True},
    ],
)
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_alternatives_without_log_probabilities_or_too_many_are_refused(
    stand: Stand, fields: dict[str, Any], is_streaming: bool
) -> None:
    """API-06."""
    refused(await chat(stand, stream=is_streaming, **fields), param="top_logprobs")


@pytest.mark.parametrize("count", [0, 1, None])
async def test_a_completions_log_probabilities_are_there_also_for_none(stand: Stand, count: int | None) -> None:
    """API-06."""
    token_ids = stand.encode("one two three")
    stand.engine.default_script = Script(token_ids=token_ids, tokens_per_step=2)

    whole = (await text(stand, max_tokens=3, logprobs=count)).json["choices"][0]["logprobs"]
    events = (await text(stand, max_tokens=3, logprobs=count, stream=True)).events

    streamed = [part["logprobs"] for part in chat_parts(events) if part["logprobs"]]
    if count is None:
        assert whole is None
        assert not streamed
        return
    assert whole["token_logprobs"] == [logprob_of(token_id) for token_id in token_ids]
    assert all(len(top) >= count for top in whole["top_logprobs"])
    for name, values in whole.items():
        assert list(itertools.chain.from_iterable(part[name] for part in streamed)) == values


# --- API-07: what a chat template does not take.

STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['content'] == 'crash' %}{{ message['content'] / 2 }}{% endif %}"
    "{% if message['content'] == 'missing' %}{{ nobody.knows.me }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def strict_stand(fault_stand: Stand, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway whose model has a template that takes little."""
    folder = write_folder(
        tmp_path_factory.mktemp("strict") / "model",
        tokenizer_json(fault_stand.model_text.tokenizer.definition),
        config={"max_position_embeddings": CONTEXT, "eos_token_id": 2},
        tokenizer_config={"eos_token": "<|im_end|>", "chat_template": STRICT_TEMPLATE},
    )
    async with open_stand(tmp_path_factory.mktemp("strict-data"), model_path=folder) as stand:
        stand.engine.default_script = Script(token_ids=stand.encode("Hi"))
        yield stand


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (turns(("system", "Be kind."), ("user", "Hi")), "System role not supported"),
        (turns(("developer", "Be kind."), ("user", "Hi")), "System role not supported"),
        (turns(("user", "Hi"), ("user", "Hello?")), "roles must alternate"),
        (turns(("assistant", "Hi")), "roles must alternate"),
        (turns(("user", "crash")), ""),
        (turns(("user", "missing")), ""),
    ],
)
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_what_a_template_refuses_is_a_400_with_its_reason(
    strict_stand: Stand, messages: list[dict[str, str]], reason: str, is_streaming: bool
) -> None:
    """API-07."""
    answer = await chat(strict_stand, messages=messages, stream=is_streaming)

    error = refused(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", "template_refused")
    assert reason in error["message"]
    assert "line" not in error["message"].split()
    assert (await chat(strict_stand, messages=turns(("user", "Hi")))).status == 200


async def test_a_template_is_asked_for_tokens_by_the_same_rules(strict_stand: Stand) -> None:
    """API-07."""
    refused(await post(strict_stand, "/tokenize", {"messages": turns(("system", "x"), ("user", "y"))}))
    body = {"max_tokens": 5, "system": "Be kind.", "messages": turns(("user", "Hi"))}
    answer = await post(strict_stand, "/v1/messages", body)

    assert answer.status == 400
    assert "System role not supported" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        (turns(("system", "S"), ("user", "U")), [("system", "S"), ("user", "U")]),
        (turns(("developer", "S"), ("user", "U")), [("system", "S"), ("user", "U")]),
        (turns(("user", "A"), ("user", "B")), [("user", "A"), ("user", "B")]),
        (turns(("user", "A"), ("assistant", "B")), [("user", "A"), ("assistant", "B")]),
        (turns(("user", "A"), ("system", "B"), ("user", "C")), [("user", "A"), ("system", "B"), ("user", "C")]),
    ],
)
async def test_smollms_own_template_takes_any_order_of_roles(
    stand: Stand, messages: list[dict[str, str]], rendered: list[tuple[str, str]]
) -> None:
    """API-07."""
    answer = await chat(stand, messages=messages)

    prompt = prompt_text(stand)
    assert answer.status == 200
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in rendered)
    assert prompt.endswith(f"{expected}<|im_start|>assistant\n")


@pytest.mark.parametrize("role", ["wizard", "", "User", "SYSTEM", None, 5, ["user"], "user\n"])
async def test_a_role_that_nobody_knows_is_refused_by_name(stand: Stand, role: Any) -> None:
    """API-07."""
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": "x"}]

    refused(await chat(stand, messages=messages), param="messages[1].role")


def prompt_text(stand: Stand) -> str:
    """The prompt that the engine was sent last, with its control tokens."""
    detokenizer = IncrementalDetokenizer(stand.model_text.tokenizer, skip_special_tokens=False)
    return detokenizer.add(list(stand.engine.submits[-1].prompt_token_ids)) + detokenizer.flush()


ENDINGS = ["", " ", "\n", "\t", "  \n", "\n\n", " \u00a0", "é", "😀", "<|im_end|>"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("begin", ["Sure: ", ""])
async def test_a_continued_message_ends_exactly_as_it_was_given(stand: Stand, begin: str, ending: str) -> None:
    """API-08."""
    given = begin + ending
    fields: dict[str, Any] = {
        "messages": [*QUESTION, {"role": "assistant", "content": given}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "temperature": 0,
    }

    answers = [await chat(stand, **fields, echo=echo) for echo in (False, False, True)]
    prompts = [list(submit.prompt_token_ids) for submit in list(stand.engine.submits)[-3:]]
    rendered = prompt_text(stand)

    assert [answer.status for answer in answers] == [200, 200, 200]
    assert prompts[0] == prompts[1] == prompts[2]
    assert rendered.endswith(f"<|im_start|>assistant\n{given}")
    assert answers[0].json["usage"]["prompt_tokens"] == len(prompts[0])
    contents = [answer.json["choices"][0]["message"]["content"] for answer in answers]
    assert contents[0] == contents[1] == "Hello there"
    assert contents[2] == f"{given}Hello there"


async def test_a_continued_message_is_the_same_streamed(stand: Stand) -> None:
    """API-08."""
    fields: dict[str, Any] = {
        "messages": [*QUESTION, {"role": "assistant", "content": "Sure: "}],
        "continue_final_message": True,
        "stream": True,
    }

    assert streamed_text((await chat(stand, **fields)).events) == "Hello there"
    assert streamed_text((await chat(stand, **fields, echo=True)).events) == "Sure: Hello there"


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "messages": QUESTION},
        {"continue_final_message": "yes"},
    ],
)
async def test_a_message_that_cannot_be_continued_is_refused(stand: Stand, fields: dict[str, Any]) -> None:
    """API-08."""
    messages = [*QUESTION, {"role": "assistant", "content": "Sure: "}]

    refused(await chat(stand, **({"messages": messages} | fields)), param="continue_final_message")


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_half_a_character_is_valid_json_with_its_own_bytes(
    stand: Stand, path: str, is_streaming: bool, max_tokens: int
) -> None:
    """API-09."""
    halves = [token_id for token_id in stand.encode("😀") if not is_text(stand, token_id)]
    half = halves[0]
    stand.engine.default_script = Script(token_ids=[half, half, half, half])
    wanted: dict[str, Any] = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    fields = {**PROMPTS[path], **wanted, "logit_bias": {str(half): 100}, "max_tokens": max_tokens}

    answer = await post(stand, path, {**fields, "stream": is_streaming})

    assert answer.status == 200
    if is_streaming:
        parts = chat_parts(answer.events)
        shown = streamed_text(answer.events)
    else:
        parts = answer.json["choices"]
        shown = parts[0]["text"] if path == TEXT else parts[0]["message"]["content"]
    # What never became a character is shown as the sign for that.
    assert set(shown) == {"\ufffd"}
    own_bytes = stand.model_text.tokenizer.token_bytes(half)
    if path == CHAT:
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert [bytes(entry["bytes"]) for entry in entries] == [own_bytes] * max_tokens
    else:
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == ["bytes:" + "".join(f"\\x{byte:02x}" for byte in own_bytes)] * max_tokens


def is_text(stand: Stand, token_id: int) -> bool:
    try:
        stand.model_text.tokenizer.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "broken",
    [
        b'{"model": "\\ud83d"}',
        b'{"messages": [{"role": "user", "content": "a\\ud83db"}]}',
        b'{"prompt": "\\ude00"}',
        b'{"model": "\xff\xfe"}',
        b'{"prompt": "caf\xe9"}',
        b'\xef\xbb\xbf{"model": "x"}',
        '{"model": "x"}'.encode("utf-16"),
        b'{"model": "x", "\\ud800": 1}',
        b'{"model": "x"} trailing',
        b"\x00",
        b"",
        b"[" * 100_000,
    ],
)
async def test_what_is_no_unicode_or_no_json_is_a_400_in_valid_json(stand: Stand, path: str, broken: bytes) -> None:
    """API-09."""
    answer = await post_raw(stand, path, broken)

    assert answer.status == 400, answer.raw
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("name", ["😀" * 20, "a\u0000b", "\u202e\u0301x", "é" * 100, "\r\nX-Evil: 1"])
async def test_text_of_a_client_in_an_error_is_valid_json(stand: Stand, name: str) -> None:
    """API-09."""
    refused(await chat(stand, model=name), status=404)
    refused(await chat(stand, **{name: 1}))
    refused(await chat(stand, messages=[{"role": name, "content": "x"}]))
    refused(await chat(stand, response_format={"type": name}))
    await still_serves(stand)


def words(stand: Stand, num_tokens: int) -> str:
    """A plain prompt of exactly so many tokens."""
    prompt = "a" + " a" * (num_tokens - 1)
    assert len(stand.encode(prompt)) == num_tokens
    return prompt


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_prompt_beyond_the_context_is_a_plain_400_with_both_numbers(
    stand: Stand, path: str, is_streaming: bool
) -> None:
    """API-11."""
    long = "a " * 9000
    prompt = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}

    error = refused(await post(stand, path, {**prompt, "stream": is_streaming}))

    assert error["code"] == "context_length_exceeded"
    numbers = [int(word) for word in error["message"].split() if word.lstrip("-").isdigit()]
    assert numbers[0] == CONTEXT
    assert numbers[1] >= 9000
    assert min(numbers) > 0


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "is_served"),
    [
        (CONTEXT - 1, 1, True),
        (CONTEXT - 1, 2, False),
        (CONTEXT - 1, None, True),
        (CONTEXT, 1, False),
        (CONTEXT, None, False),
        (CONTEXT + 1, 1, False),
        (CONTEXT - 20, 20, True),
        (CONTEXT - 20, 21, False),
    ],
)
async def test_the_borders_of_the_context_are_exact(
    stand: Stand, num_tokens: int, max_tokens: int | None, is_served: bool, is_streaming: bool
) -> None:
    """API-11."""
    answer = await text(stand, prompt=words(stand, num_tokens), max_tokens=max_tokens, stream=is_streaming)

    if is_served:
        assert answer.status == 200
        assert list(stand.engine.submits[-1].prompt_token_ids) == stand.encode(words(stand, num_tokens))
        assert stand.engine.submits[-1].sampling_params.max_output_tokens <= CONTEXT - num_tokens
    else:
        error = refused(answer, param="prompt")
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert f"prompt has {num_tokens} tokens" in error["message"]


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_output_limits_that_make_no_sense_are_refused_and_null_is_the_default(
    stand: Stand, path: str, is_streaming: bool
) -> None:
    """API-11."""
    base = {**PROMPTS[path], "stream": is_streaming}

    too_long = refused(await post(stand, path, {**base, "max_tokens": 10**9}))
    for value in (-1, 1.5, "5", True, 10**12, *([0] if path == CHAT else [])):
        refused(await post(stand, path, {**base, "max_tokens": value}), param="max_tokens")
    default = await post(stand, path, {**base, "max_tokens": None})
    limit = stand.engine.submits[-1].sampling_params.max_output_tokens

    assert too_long["code"] == "context_length_exceeded"
    assert str(10**9) in too_long["message"]
    assert default.status == 200
    assert limit == (16 if path == TEXT else 4096)
    if path == TEXT:
        # Without anything to show of the prompt there would be nothing to answer.
        refused(await post(stand, path, {**base, "max_tokens": 0}), param="max_tokens")


async def test_a_body_is_read_as_it_is_written(stand: Stand) -> None:
    """API-09: escapes of whole characters are text like any other."""
    body = json.dumps({"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "😀 é"}]})
    assert "\\ud83d\\ude00" in body

    answer = await post_raw(stand, CHAT, body.encode())

    assert answer.status == 200
    assert "😀 é" in prompt_text(stand)


async def test_the_field_that_is_null_is_left_out(stand: Stand) -> None:
    """Clients made from a schema of both forms send null for the other."""
    plain = await post(stand, "/tokenize", {"prompt": "Hi", "messages": None})
    turns_ = await post(stand, "/tokenize", {"prompt": None, "messages": QUESTION})

    assert plain.json["tokens"] == stand.encode("Hi")
    assert turns_.json["count"] > len(QUESTION)
    refused(await post(stand, "/tokenize", {"prompt": None, "messages": None}), param="prompt")


async def test_speakers_have_names(stand: Stand) -> None:
    """Neroued/ninfer#110: refusing what every framework of agents sends. This template does not write them."""
    named = [message | {"name": "bob"} for message in QUESTION]

    answer, plain = await chat(stand, messages=named), await chat(stand)

    assert answer.status == 200, answer.raw
    assert answer.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]


async def test_a_clients_offsets_are_places_in_the_echoed_text(stand: Stand) -> None:
    """vllm-project/vllm#47815 and #3441: offsets after a control token were short by its text."""
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    answer = await text(stand, prompt=prompt, echo=True, logprobs=0)
    choice = answer.json["choices"][0]
    streamed = chat_parts((await text(stand, prompt=prompt, echo=True, logprobs=0, stream=True)).events)

    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    offsets = [offset for part in streamed if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    assert offsets == found["text_offset"]
