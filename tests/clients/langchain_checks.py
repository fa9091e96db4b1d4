"""What langchain-openai gets from a server. Usage: langchain_checks.py BASE_URL MODEL; prints one JSON object."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

base_url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{base_url}/v1", api_key="none", max_retries=0)
question = HumanMessage("Name three primes.")
schema = {
    "title": "person",
    "description": "A person.",
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "describe", "description": "Describe.", "parameters": schema}}

plain = chat.invoke([question]).content
streamed = "".join(chunk.content for chunk in chat.stream([question]))
called = chat.bind_tools([tool], tool_choice="any").invoke([question])
(call,) = called.tool_calls
answered = chat.bind_tools([tool]).invoke([question, called, ToolMessage("done", tool_call_id=call["id"])]).content
person = chat.with_structured_output(schema, method="json_schema", strict=True).invoke([question])
print(
    json.dumps(
        {
            "plain": plain,
            "streamed": streamed,
            "tool": {"name": call["name"], "arguments": call["args"]},
            "answered": answered,
            "json": person,
        }
    )
)
