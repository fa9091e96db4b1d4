"""Messages of octavo.inference.v1 as the bodies of HTTP, and chunks of HTTP as messages."""

from __future__ import annotations

from typing import Any

import pytest

from libs.errors import InvalidRequest
from libs.protogen.inference.v1 import inference_pb2 as pb
from services.gateway.inference.wire import chat_body, chat_message, text_body, text_message, tokenize_body
from services.gateway.openai_fields import CHAT_FIELDS, TEXT_FIELDS

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def test_every_option_has_the_name_of_a_field_of_both_routes() -> None:
    names = {field.name for field in pb.GenerationOptions.DESCRIPTOR.fields}

    assert names <= CHAT_FIELDS
    assert names <= TEXT_FIELDS


def test_only_what_is_set_is_in_the_body() -> None:
    request = pb.ChatCompletionRequest(model="m", messages=[pb.ChatMessage(role="user", content="")])

    assert chat_body(request) == {"model": "m", "messages": [{"role": "user", "content": ""}], **STREAMED}


def test_messages_have_the_fields_that_they_have_over_http() -> None:
    named = pb.ChatMessage(role="user", content="a", name="bob")
    result = pb.ChatMessage(role="tool", content="3", name="f", tool_call_id="c")

    assert chat_body(pb.ChatCompletionRequest(messages=[named, result]))["messages"] == [
        {"role": "user", "content": "a", "name": "bob"},
        {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c"},
    ]


def test_every_option_is_the_field_that_it_is_over_http() -> None:
    options = pb.GenerationOptions(
        n=2,
        temperature=0.0,
        top_k=0,
        seed=-(2**63),
        logit_bias={7: -1.5},
        allowed_token_ids=[1, 2],
        bad_words=["a"],
        stop=["x", "y"],
        ignore_eos=False,
        truncate_prompt_tokens=-1,
        metadata={"a": "b"},
        structured_outputs=pb.StructuredOutputs(choice=pb.Choices(values=["u", "v"])),
    )

    body = chat_body(pb.ChatCompletionRequest(options=options))

    # Zero and false are values like others, unlike what is left out.
    assert body == {
        "model": "",
        "messages": [],
        "n": 2,
        "temperature": 0.0,
        "top_k": 0,
        "seed": -(2**63),
        "logit_bias": {"7": -1.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["a"],
        "stop": ["x", "y"],
        "ignore_eos": False,
        "truncate_prompt_tokens": -1,
        "metadata": {"a": "b"},
        "structured_outputs": {"choice": ["u", "v"]},
        **STREAMED,
    }


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (pb.StructuredOutputs(json='{"type":"object"}'), {"json": '{"type":"object"}'}),
        (pb.StructuredOutputs(json_object=True), {"json_object": True}),
        (pb.StructuredOutputs(regex="a+"), {"regex": "a+"}),
        (pb.StructuredOutputs(grammar="g"), {"grammar": "g"}),
        (pb.StructuredOutputs(), {}),
    ],
)
def test_a_form_keeps_its_kind(form: pb.StructuredOutputs, field: dict[str, Any]) -> None:
    request = pb.CompletionRequest(options=pb.GenerationOptions(structured_outputs=form))

    assert text_body(request)["structured_outputs"] == field


def test_tools_keep_the_order_of_their_parameters() -> None:
    tool = pb.Tool(name="f", description="does", parameters='{"properties":{"z":{},"a":{}}}')
    call = pb.ToolCall(id="1", name="f", arguments="{}")
    request = pb.ChatCompletionRequest(
        messages=[pb.ChatMessage(role="assistant", tool_calls=[call])], tools=[tool], tool_choice_function="f"
    )

    body = chat_body(request)

    assert body["messages"] == [
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        }
    ]
    function = body["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("f", "does")
    assert list(function["parameters"]["properties"]) == ["z", "a"]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_parameters_that_are_no_json_are_refused_by_name() -> None:
    request = pb.ChatCompletionRequest(tools=[pb.Tool(name="f"), pb.Tool(name="g", parameters="{")])

    with pytest.raises(InvalidRequest) as caught:
        chat_body(request)

    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("prompts", "prompt"),
    [
        ([pb.Prompt(text="a")], "a"),
        ([pb.Prompt(text="a"), pb.Prompt(text="b")], ["a", "b"]),
        ([pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2]))], [1, 2]),
        ([pb.Prompt(token_ids=pb.TokenIds(ids=[1]))] * 2, [[1], [1]]),
        ([], []),
        ([pb.Prompt()], None),
    ],
)
def test_prompts_have_the_four_shapes_of_http(prompts: list[pb.Prompt], prompt: Any) -> None:
    assert text_body(pb.CompletionRequest(prompts=prompts))["prompt"] == prompt


def test_a_prompt_or_messages_are_tokenized() -> None:
    conversation = pb.TokenizeRequest(messages=[pb.ChatMessage(role="user", content="a")])

    assert tokenize_body(pb.TokenizeRequest(prompt="a", model="m")) == {"prompt": "a", "model": "m"}
    assert tokenize_body(conversation) == {"messages": [{"role": "user", "content": "a"}]}


def test_the_prompts_tokens_are_told_once_for_all_choices_of_a_chat() -> None:
    def chunk(index: int) -> dict[str, Any]:
        choice = {"index": index, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}
        return {"id": "i", "created": 1, "model": "m", "choices": [choice], "prompt_token_ids": [5, 6]}

    data = b"".join(chat_message(chunk(index)).SerializeToString() for index in range(3))
    message = pb.ChatCompletionResponse.FromString(data)

    assert list(message.prompt_token_ids) == [5, 6]
    assert [choice.index for choice in message.choices] == [0, 1, 2]
    assert message.created_time.seconds == 1


def test_log_probabilities_keep_bytes_nulls_and_alternatives() -> None:
    entry = {"token": "�", "logprob": -1.5, "bytes": [240, 159]}
    chat = {"index": 0, "delta": {"content": "�"}, "finish_reason": None}
    chat["logprobs"] = {"content": [entry | {"top_logprobs": [entry]}]}
    text: dict[str, Any] = {"index": 0, "text": "ab", "finish_reason": "stop"}
    text["logprobs"] = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    head = {"id": "i", "created": 1, "model": "m"}

    (chat_choice,) = chat_message(head | {"choices": [chat]}).choices
    (text_choice,) = text_message(head | {"choices": [text]}).choices

    assert (chat_choice.logprobs[0].bytes, chat_choice.logprobs[0].top_logprobs[0].logprob) == (b"\xf0\x9f", -1.5)
    assert [one.HasField("logprob") for one in text_choice.logprobs] == [False, True]
    assert [one.text_offset for one in text_choice.logprobs] == [0, 1]
    assert [(top.token, top.logprob) for top in text_choice.logprobs[1].top_logprobs] == [("b", -0.5)]
    assert text_choice.finish_reason == "stop"


def test_what_is_said_of_reasoning_is_as_over_http() -> None:
    request = pb.ChatCompletionRequest(
        messages=[pb.ChatMessage(role="assistant", content="b", reasoning_content="a")],
        chat_template_kwargs='{"enable_thinking": false}',
        reasoning_effort="none",
        include_reasoning=False,
        thinking_token_budget=7,
    )

    body = chat_body(request)

    assert body["messages"] == [{"role": "assistant", "content": "b", "reasoning_content": "a"}]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    names = ("reasoning_effort", "include_reasoning", "thinking_token_budget")
    assert [body[name] for name in names] == ["none", False, 7]
    request.chat_template_kwargs = "{"
    with pytest.raises(InvalidRequest) as caught:
        chat_body(request)
    assert caught.value.param == "chat_template_kwargs"
