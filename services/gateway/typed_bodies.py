"""JSON schemas of the bodies whose types check them: those of Anthropic's endpoints and of OpenAI's responses.

Owns what their fields are for, in words; all else is in the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from services.gateway.anthropic_schema import CountTokensBody, MessagesBody
from services.gateway.request_fields import JsonSchema
from services.gateway.responses_schema import MessageItem, ResponseBody

_BODIES: Final = (MessagesBody, CountTokensBody, ResponseBody)
_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "include": "What else the answer has.",
    "input": "A text of the user, or the whole conversation: nothing is stored here.",
    "instructions": "What the system says before the conversation.",
    "max_output_tokens": "Longest answer, in tokens. Without it the room left, within a limit.",
    "max_tokens": "Longest answer, in tokens.",
    "messages": "The conversation. The answer goes on with the assistant's last message.",
    "metadata": "Recorded in the request's log event.",
    "parallel_tool_calls": "Whether an answer may call more than one tool. Without it true.",
    "reasoning": "How the model reasons; an effort that this model cannot be told is refused.",
    "safety_identifier": "OpenAI's newer name of user; if both are given they are equal.",
    "stop_sequences": "Strings that end the answer and are no part of it.",
    "stream": "Answer with server-sent events. Without it false.",
    "system": "What the system says before the conversation.",
    "temperature": "Divides the logits before a draw; below 0.001 is greedy. Without it the model's own, or 1.",
    "text": "The form of the answer.",
    "thinking": "Whether the model reasons before it answers, where it can; a budget is below max_tokens.",
    "tool_choice": "Whether the model may, must or must not call one of tools. Without it it may.",
    "tools": "Functions that the model may call; each has a name of its own.",
    "top_k": "So many of the likeliest tokens are drawn from; 0 keeps all. Without it the model's own, or all.",
    "top_p": "The likeliest tokens with this probability in all are drawn from. Without it the model's own, or 1.",
    "top_logprobs": "Likeliest tokens beside each token of the answer; needs include.",
    "user": "Recorded in the request's log event.",
}


def typed_body_schemas(model: JsonSchema, ref_template: str) -> dict[str, JsonSchema]:
    """Return the schemas of the bodies and of their parts by name; ``model`` is that of a model's name."""
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=ref_template)
    found: dict[str, JsonSchema] = dict(schemas)
    for body in _BODIES:
        properties = found[body.__name__]["properties"]
        described = {
            name: schema | ({"description": _DESCRIPTIONS[name]} if name in _DESCRIPTIONS else {})
            for name, schema in properties.items()
        }
        found[body.__name__] |= {"properties": described | {"model": model}}
    _let_messages_go_without_type(found)
    return found


def _let_messages_go_without_type(schemas: dict[str, JsonSchema]) -> None:
    """Say what ``responses_schema`` does before the types see a body: an item without a type is a message."""
    message = schemas[MessageItem.__name__]
    schemas[MessageItem.__name__] = message | {"required": [name for name in message["required"] if name != "type"]}
    (items,) = (one for one in schemas[ResponseBody.__name__]["properties"]["input"]["anyOf"] if "items" in one)
    del items["items"]["discriminator"]
