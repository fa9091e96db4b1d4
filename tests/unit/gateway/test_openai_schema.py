"""What a chat completion request may say."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import InvalidRequest, ModelNotFound, OctavoError, UnsupportedField
from libs.text import ChatMessage
from services.gateway.generation_options import GenerationOptions
from services.gateway.openai_fields import CHAT_FIELDS
from services.gateway.openai_schema import (
    MAX_MESSAGES,
    ModelFacts,
    ValidChatCompletion,
    parse_chat_completion,
    read_head,
)
from services.gateway.prompts import ChatPrompt

MODEL = ModelFacts(name="tiny", vocab_size=1000)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields


def parse(**fields: Any) -> ValidChatCompletion:
    return parse_chat_completion(body(**fields), MODEL)


def refusal(**fields: Any) -> OctavoError:
    with pytest.raises(OctavoError) as caught:
        parse(**fields)
    return caught.value


def test_a_minimal_request_has_the_documented_defaults() -> None:
    request = parse()

    assert request == ValidChatCompletion(
        model="tiny",
        prompt=ChatPrompt((ChatMessage("user", "Hi"),), add_generation_prompt=True, continue_final_message=False),
        options=GenerationOptions(
            num_choices=1,
            temperature=1.0,
            top_p=None,
            top_k=None,
            min_p=None,
            seed=None,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=None,
            logit_bias={},
            allowed_token_ids=(),
            bad_words=(),
            constraint=None,
            max_output_tokens=None,
            min_output_tokens=0,
            stop_strings=(),
            includes_stop_string=False,
            stop_token_ids=(),
            ignore_eos=False,
            skips_special_tokens=True,
            truncate_prompt_tokens=None,
            priority=0,
            is_streaming=False,
            includes_usage=False,
            has_continuous_usage=False,
            returns_token_ids=False,
            returns_timings=False,
            num_logprobs=None,
            num_prompt_logprobs=None,
            num_echoed_logprobs=None,
            echoes_prompt=False,
            user=None,
            metadata={},
            reads_reasoning=True,
        ),
    )


def test_served_fields_are_read() -> None:
    options = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-1,
        max_completion_tokens=7,
        min_tokens=2,
        stop=["END", "END", "."],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True},
        user="u-1",
        metadata={"job": "nightly"},
    ).options

    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 40, 0.1)
    assert options.seed == 2**64 - 1
    assert (options.max_output_tokens, options.min_output_tokens) == (7, 2)
    assert options.stop_strings == ("END", ".")
    assert options.stop_token_ids == (3, 4)
    assert options.ignore_eos
    assert options.is_streaming
    assert (options.includes_usage, options.has_continuous_usage) == (True, True)
    assert (options.user, options.metadata) == ("u-1", {"job": "nightly"})


def test_fields_that_change_the_draw_are_read() -> None:
    options = parse(
        n=3,
        presence_penalty=-2,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={"0": -100, "999": 2.5},
        allowed_token_ids=[5, 6, 5],
        bad_words=["no", "no", "never"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=10,
        priority=-7,
        return_token_ids=True,
    ).options

    assert options.num_choices == 3
    assert (options.presence_penalty, options.frequency_penalty) == (-2.0, 1.5)
    assert options.repetition_penalty == 1.1
    assert options.logit_bias == {0: -100.0, 999: 2.5}
    assert options.allowed_token_ids == (5, 6)
    assert options.bad_words == ("no", "never")
    assert (options.includes_stop_string, options.skips_special_tokens) == (True, False)
    assert options.truncate_prompt_tokens == 10
    # A client's lower is earlier, an engine's higher.
    assert options.priority == 7
    assert options.returns_token_ids


WRONG_VALUES: dict[str, list[Any]] = {
    # The sweep of absurd sampling values that has hung or crashed other servers.
    "temperature": [-1, -0.1, 2.1, 1e6, 10**400, "0.5", True, "NaN", [], {}],
    "top_p": [-1, 0, 0.0, 1.5, "1", False],
    "top_k": [0.01, -2, 1.0, 10**12, 1001, "5", True],
    "min_p": [-0.1, 2, -(10**400), "0", True],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "max_tokens": [0, -1, 1.5, "5", True, 10**30],
    "max_completion_tokens": [0, -1, 1.5, "5", True],
    "min_tokens": [-1, 0.5, True],
    "stop": [5, [""], "", ["a"] * 5, ["a"] * 100_000, [None], "x" * 257, ["a", 1], {}, True],
    "stop_token_ids": [5, [-1], [1000], [True], ["1"], list(range(65))],
    "stream": ["true", 1, 0],
    "ignore_eos": ["no", 1],
    "n": [0, -1, 129, 100_000, 1.5, "2", True],
    "presence_penalty": [1e9, -2.1, "0", True, []],
    "frequency_penalty": [1e9, 2.5, True],
    "repetition_penalty": [0, -1, 1e9, "1", True],
    "logit_bias": [
        [],
        "5",
        {"1000": 1},
        {"-1": 1},
        {"x": 1},
        {"05": 1},
        {" 5": 1},
        {"\u0665": 1},
        {"9" * 5000: 1},
        {"5": 101},
        {"5": 10**400},
        {"5": "1"},
        {"5": True},
        {"5": None},
        {str(number): 1 for number in range(49152)},
    ],
    "allowed_token_ids": [5, [], [-1], [1000], [True], ["1"], list(range(1000)) * 2],
    "bad_words": ["no", [5], [""], ["x" * 257], ["x"] * 50_000],
    "include_stop_str_in_output": ["yes", 1],
    "skip_special_tokens": ["no", 0],
    "truncate_prompt_tokens": [0, -2, 1.5, "5", True],
    "priority": [101, -101, 1.5, "high", True],
    "add_generation_prompt": ["no", 1],
    "continue_final_message": ["no", 1],
    "echo": ["no", 1],
    "return_token_ids": ["no", 1],
    "logprobs": [1, 0, "yes"],
    "top_logprobs": [21, -1, 1.5, True, 49152],
    "prompt_logprobs": [21, -1, 1.5, True],
    "user": [5, "x" * 257],
    "metadata": [[], {"a": 1}, {str(i): "" for i in range(17)}, {"a": "x" * 513}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_VALUES.items() for value in values]
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})

    assert isinstance(error, InvalidRequest)
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 10**6),
        ("best_of", 2),
        ("suffix", "end"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("chat_template", "{{ messages }}"),
        ("cache_salt", "mine"),
        ("guided_json", {}),
        ("store", True),
        ("reasoning_effort", "high"),
        ("modalities", ["text", "audio"]),
        ("lora", "../../etc/passwd"),
    ],
)
def test_a_known_field_that_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})

    assert isinstance(error, UnsupportedField)
    assert error.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "conversation-7"},
        {"verbosity": "medium"},
        {"suffix": ""},
        {"spaces_between_special_tokens": False},
    ],
)
def test_what_clients_send_unasked_changes_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


def test_values_that_change_nothing_are_accepted() -> None:
    request = parse(
        n=1,
        logprobs=False,
        top_logprobs=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        add_generation_prompt=True,
        skip_special_tokens=True,
        temperature=None,
        top_p=None,
        stop=None,
        max_tokens=None,
        stream=None,
        stream_options=None,
        service_tier="auto",
    )

    assert request == parse()


def test_an_unknown_field_is_refused_and_a_close_one_is_offered() -> None:
    error = refusal(temprature=0.5)

    assert error.param == "temprature"
    assert "'temperature'" in error.message


def test_a_huge_unknown_name_is_shortened() -> None:
    error = refusal(**{"x" * 10_000: 1})

    assert len(error.message) < 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hi", "messages"),
        ([], "messages"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": "x", "name": 5}],
            "messages[1].name",
        ),
        ([{"role": "user", "content": "x", "name": "b" * 65}], "messages[0].name"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
    ],
)
def test_wrong_messages_are_refused_by_their_place(messages: Any, param: str) -> None:
    assert refusal(messages=messages).param == param


def test_content_parts_are_joined_and_developer_speaks_as_system() -> None:
    request = parse(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            # An answer sent back as the client got it.
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        ]
    )

    assert request.prompt.messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "c"),
    )


def test_speakers_have_names_and_who_was_cut_while_thinking_said_nothing() -> None:
    """Neroued/ninfer#110, microsoft/autogen and LangChain send names; an answer may be all reasoning."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = parse(
        messages=[
            {"role": "user", "content": "a", "name": "bob"},
            {"role": "user", "content": "b", "name": ""},
            {"role": "assistant", "content": None, "reasoning_content": "hm"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "3", "name": "f"},
            {"role": "user", "content": [{"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}]},
        ]
    )

    assert [message.name for message in request.prompt.messages] == ["bob", None, None, None, "f", None]
    assert [message.content for message in request.prompt.messages] == ["a", "b", "", "", "3", "c"]
    assert request.prompt.messages[2].reasoning == "hm"


def test_a_message_that_calls_tools_is_not_continued() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    assert refusal(messages=messages, continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize("name", ["other", "../../etc/passwd", "/etc/passwd", "C:\\x", "a\u0000b", "x" * 10_240])
def test_another_model_is_not_found_and_its_name_is_made_safe(name: str) -> None:
    error = refusal(model=name)

    assert isinstance(error, ModelNotFound)
    assert len(error.message) < 200
    assert error.message.isprintable()


@pytest.mark.parametrize("name", ["", None, 5, ["tiny"]])
def test_a_model_must_be_named(name: Any) -> None:
    error = refusal(model=name)

    assert isinstance(error, InvalidRequest)
    assert error.param == "model"


def test_log_probabilities_are_asked_for_with_or_without_alternatives() -> None:
    assert parse().options.num_logprobs is None
    assert parse(logprobs=False, top_logprobs=0).options.num_logprobs is None
    assert parse(logprobs=True).options.num_logprobs == 0
    assert parse(logprobs=True, top_logprobs=None).options.num_logprobs == 0
    assert parse(logprobs=True, top_logprobs=20).options.num_logprobs == 20
    assert parse(prompt_logprobs=0).options.num_measured_prompt_logprobs == 0
    # In a conversation what is echoed is text alone.
    assert parse(logprobs=True, echo=True).options.num_measured_prompt_logprobs is None


def test_alternatives_need_log_probabilities_and_those_of_prompts_a_whole_answer() -> None:
    assert refusal(logprobs=False, top_logprobs=2).param == "top_logprobs"
    assert refusal(top_logprobs=2).param == "top_logprobs"
    assert refusal(prompt_logprobs=1, stream=True).param == "prompt_logprobs"


TURNS = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "Sure: "}]


def test_a_last_message_can_be_continued_and_echoed() -> None:
    continued = parse(messages=TURNS, continue_final_message=True)

    assert (continued.prompt.add_generation_prompt, continued.prompt.continue_final_message) == (False, True)
    assert not continued.options.echoes_prompt
    assert parse(messages=TURNS, continue_final_message=True, echo=True).options.echoes_prompt
    assert not parse(add_generation_prompt=False).prompt.add_generation_prompt


def test_a_message_is_continued_or_a_new_one_begun_and_only_the_assistants() -> None:
    both = refusal(messages=TURNS, continue_final_message=True, add_generation_prompt=True)

    assert both.param == "continue_final_message"
    assert refusal(continue_final_message=True).param == "continue_final_message"


def test_two_different_limits_are_refused() -> None:
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"
    assert parse(max_tokens=5, max_completion_tokens=5).options.max_output_tokens == 5


def test_min_tokens_must_fit_below_max_tokens() -> None:
    assert refusal(max_tokens=5, min_tokens=6).param == "min_tokens"


def test_stream_options_need_a_stream() -> None:
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(stream=True, stream_options=[]).param == "stream_options"
    assert refusal(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert refusal(stream=True, stream_options={"continuous_usage_stats": 1}).param is not None
    assert refusal(stream=True, stream_options={"x": 1}).param == "stream_options.x"
    assert refusal(stream=True, stream_options={"include_obfuscation": True}).param is not None


def test_top_k_may_say_all_in_two_ways() -> None:
    assert parse(top_k=-1).options.top_k is None
    assert parse(top_k=0).options.top_k is None
    assert parse(top_k=1000).options.top_k == 1000


def test_a_tiny_temperature_is_greedy() -> None:
    assert parse(temperature=1e-4).options.temperature == 0.0
    assert parse(temperature=0.001).options.temperature == 0.001


def test_the_head_of_a_wrong_request_is_still_read() -> None:
    head = read_head({"model": "m\n" + "x" * 100, "stream": True, "messages": 5})

    assert head.model_name.startswith("m?x")
    assert len(head.model_name) == 64
    assert head.is_streaming
    assert not read_head({"stream": "yes", "model": 5}).is_streaming


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from(sorted(CHAT_FIELDS | {"tools", "response_format"}))


@given(st.dictionaries(FIELD_NAMES, JSON_VALUES, max_size=4))
def test_any_json_is_parsed_or_refused_with_an_error_that_is_json(fields: dict[str, Any]) -> None:
    try:
        request: ValidChatCompletion | None = parse(**fields)
        answer: dict[str, Any] = {}
    except OctavoError as error:
        request, answer = None, {"message": error.message, "param": error.param}

    assert orjson.dumps(answer)
    assert request is None or (0 <= request.options.temperature <= 2 and request.prompt.messages)


def test_every_parameter_of_openais_client_is_known() -> None:
    signature = inspect.signature(openai.resources.chat.Completions.create)
    names = set(signature.parameters) - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

    unknown = {
        name for name in names if name not in CHAT_FIELDS and "Unknown" in refusal(**{name: object()}).message
    }

    assert len(names) > 30
    assert unknown == set()


def test_a_schema_that_is_nested_too_deep_is_refused_by_name() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    function = {"type": "function", "function": {"name": "deep", "parameters": schema}}

    for fields in ({"response_format": form}, {"tools": [function]}):
        with pytest.raises(InvalidRequest, match="nested at most 64 levels") as refused:
            parse(**fields)
        assert refused.value.param is not None
