"""octavo.inference.v1 from and to the values of the HTTP API: a request as its JSON body, a chunk as a message.

Owns the translation. It must not know what a field means: values are checked where those of HTTP are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from google.protobuf.timestamp_pb2 import Timestamp

from libs.errors import InvalidRequest
from libs.protogen.inference.v1 import inference_pb2

# Answers are streams, and their last message always has the counts.
_STREAMED: Final[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}


def chat_body(request: inference_pb2.ChatCompletionRequest) -> dict[str, Any]:
    """Return the body of a chat completion; raises InvalidRequest for a tool's parameters that are no JSON."""
    names = (
        *("logprobs", "top_logprobs", "add_generation_prompt", "continue_final_message", "parallel_tool_calls"),
        *("reasoning_effort", "include_reasoning", "thinking_token_budget"),
    )
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_message(message) for message in request.messages],
        **_options(request.options),
        **_STREAMED,
        **_set_fields(request, names),
    }
    if request.tools:
        body["tools"] = [
            {"type": "function", "function": _function(tool, f"tools[{index}].function.parameters")}
            for index, tool in enumerate(request.tools)
        ]
    if request.HasField("tool_choice_function"):
        body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice_function}}
    elif request.HasField("tool_choice"):
        body["tool_choice"] = request.tool_choice
    if request.HasField("chat_template_kwargs"):
        body["chat_template_kwargs"] = _json(request.chat_template_kwargs, "chat_template_kwargs")
    return body


def text_body(request: inference_pb2.CompletionRequest) -> dict[str, Any]:
    """Return the body of a plain completion."""
    prompts = [_prompt(prompt) for prompt in request.prompts]
    return {
        "model": request.model,
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        **_options(request.options),
        **_STREAMED,
        **_set_fields(request, ("logprobs", "add_special_tokens")),
    }


def tokenize_body(request: inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """Return the body of a request for tokens."""
    names = ("model", "prompt", "add_special_tokens", "add_generation_prompt", "continue_final_message")
    body = _set_fields(request, names)
    if request.messages:
        body["messages"] = [_message(message) for message in request.messages]
    return body


def chat_message(chunk: Mapping[str, Any]) -> inference_pb2.ChatCompletionResponse:
    """Return a chunk of a chat completion."""
    message = inference_pb2.ChatCompletionResponse(
        id=chunk["id"],
        created_time=Timestamp(seconds=chunk["created"]),
        model=chunk["model"],
        choices=[_chat_choice(choice) for choice in chunk["choices"]],
        usage=_usage(chunk.get("usage")),
    )
    if any(choice["index"] == 0 for choice in chunk["choices"]):
        # Every choice repeats it over HTTP; messages merge, so here the first tells it for all.
        message.prompt_token_ids.extend(chunk.get("prompt_token_ids") or ())
    return message


def text_message(chunk: Mapping[str, Any]) -> inference_pb2.CompletionResponse:
    """Return a chunk of a plain completion."""
    return inference_pb2.CompletionResponse(
        id=chunk["id"],
        created_time=Timestamp(seconds=chunk["created"]),
        model=chunk["model"],
        choices=[_text_choice(choice) for choice in chunk["choices"]],
        usage=_usage(chunk.get("usage")),
    )


def models_message(models: Iterable[Mapping[str, Any]]) -> inference_pb2.ListModelsResponse:
    """Return the list of models."""
    return inference_pb2.ListModelsResponse(
        models=[
            inference_pb2.Model(
                id=model["id"],
                root=model["root"],
                created_time=Timestamp(seconds=model["created"]),
                max_model_len=model["max_model_len"],
            )
            for model in models
        ]
    )


def tokens_message(tokens: Mapping[str, Any]) -> inference_pb2.TokenizeResponse:
    """Return the tokens of a prompt."""
    return inference_pb2.TokenizeResponse(token_ids=tokens["tokens"], max_model_len=tokens["max_model_len"])


def _set_fields(message: Any, names: Sequence[str]) -> dict[str, Any]:  # Any: one of the requests.
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _options(options: inference_pb2.GenerationOptions) -> dict[str, Any]:
    """Return what is set."""
    body: dict[str, Any] = {}
    for field, value in options.ListFields():
        match field.name:
            case "logit_bias":
                body[field.name] = {str(token_id): bias for token_id, bias in value.items()}
            case "metadata":
                body[field.name] = dict(value)
            case "structured_outputs":
                body[field.name] = _structured_outputs(value)
            case _:
                body[field.name] = list(value) if field.is_repeated else value
    return body


def _structured_outputs(options: inference_pb2.StructuredOutputs) -> dict[str, Any]:
    form = options.WhichOneof("form")
    if form is None:
        return {}
    return {form: list(options.choice.values) if form == "choice" else getattr(options, form)}


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role} | _set_fields(
        message, ("content", "name", "tool_call_id", "reasoning_content")
    )
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _function(tool: inference_pb2.Tool, path: str) -> dict[str, Any]:
    function = {"name": tool.name} | _set_fields(tool, ("description",))
    if tool.HasField("parameters"):
        function["parameters"] = _json(tool.parameters, path)
    return function


def _json(text: str, path: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"'{path}' is not valid JSON: {error}.", param=path) from error


def _prompt(prompt: inference_pb2.Prompt) -> str | list[int] | None:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "token_ids":
            return list(prompt.token_ids.ids)
        case _:
            return None


def _chat_choice(choice: Mapping[str, Any]) -> inference_pb2.ChatChoice:
    delta = choice["delta"]
    return inference_pb2.ChatChoice(
        index=choice["index"],
        role=delta.get("role"),
        content=delta.get("content"),
        reasoning_content=delta.get("reasoning_content"),
        tool_calls=[_call_delta(call) for call in delta.get("tool_calls") or ()],
        finish_reason=choice["finish_reason"],
        logprobs=[_chat_logprob(entry) for entry in (choice["logprobs"] or {"content": ()})["content"]],
        token_ids=choice.get("token_ids"),
    )


def _call_delta(call: Mapping[str, Any]) -> inference_pb2.ToolCallDelta:
    function = call["function"]
    return inference_pb2.ToolCallDelta(
        index=call["index"], id=call.get("id"), name=function.get("name"), arguments=function["arguments"]
    )


def _chat_logprob(entry: Mapping[str, Any]) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token=entry["token"],
        logprob=entry["logprob"],
        bytes=bytes(entry["bytes"]),
        top_logprobs=[
            inference_pb2.TopLogprob(token=one["token"], logprob=one["logprob"], bytes=bytes(one["bytes"]))
            for one in entry["top_logprobs"]
        ],
    )


def _text_choice(choice: Mapping[str, Any]) -> inference_pb2.TextChoice:
    logprobs = choice["logprobs"]
    return inference_pb2.TextChoice(
        index=choice["index"],
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        logprobs=() if logprobs is None else _text_logprobs(logprobs),
        token_ids=choice.get("token_ids"),
        prompt_token_ids=choice.get("prompt_token_ids"),
    )


def _text_logprobs(logprobs: Mapping[str, Sequence[Any]]) -> list[inference_pb2.TokenLogprob]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [
        inference_pb2.TokenLogprob(
            token=token,
            logprob=logprob,
            top_logprobs=[inference_pb2.TopLogprob(token=name, logprob=one) for name, one in (top or {}).items()],
            text_offset=offset,
        )
        for token, logprob, top, offset in zip(*(logprobs[name] for name in names), strict=True)
    ]


def _usage(usage: Mapping[str, Any] | None) -> inference_pb2.Usage | None:
    if usage is None:
        return None
    return inference_pb2.Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens"),
        reasoning_tokens=usage.get("completion_tokens_details", {}).get("reasoning_tokens"),
    )
