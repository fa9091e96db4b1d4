"""What litellm gets from a server. Usage: litellm_checks.py BASE_URL MODEL; prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

base_url, model = sys.argv[1:]
question = [{"role": "user", "content": "Name three primes."}]
schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "describe", "description": "Describe.", "parameters": schema}}
person_format = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def complete(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}",
        api_base=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        messages=messages,
        **fields,
    )


plain = complete(question).choices[0].message.content
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in complete(question, stream=True))
called = complete(question, tools=[tool], tool_choice="required").choices[0].message
(call,) = called.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
answered = complete([*question, called, result], tools=[tool]).choices[0].message.content
person = json.loads(complete(question, response_format=person_format).choices[0].message.content)
print(
    json.dumps(
        {
            "plain": plain,
            "streamed": streamed,
            "tool": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
            "answered": answered,
            "json": person,
        }
    )
)
