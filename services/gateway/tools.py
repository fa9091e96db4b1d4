"""The tools of a conversation: what clients offer, how a model hears of them, and the grammar that holds its calls.

Owns the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``, and Hermes' form of calls, which Qwen and
many others are trained on: ``<tool_call>`` around JSON with ``name`` and ``arguments``. It must not know how an
answer is read or written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from libs.errors import InvalidRequest, UnsupportedField
from libs.grammar import Grammar, GrammarForm, check_grammar
from libs.grammar.compiler import JSON_OPTIONS
from libs.text import ChatMessage
from services.gateway.generation_fields import PARALLEL_TOOL_CALLS
from services.gateway.output_constraints import OutputConstraint

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 16
MAX_DESCRIPTION_CHARACTERS: Final = 8192
CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"

# Of a call that was made. One that a client put together from a stream has its place in the message, and OpenAI's
# clients add what they have read out of the arguments.
_CALL_FIELDS: Final = frozenset({"id", "type", "function", "index"})
_FUNCTION_FIELDS: Final = frozenset({"name", "arguments", "parsed_arguments"})
_CHOICE_FIELDS: Final = frozenset({"type", "function"})
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# As Qwen's template words it.
_INTRODUCTION: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within {begin}{end} XML tags:\n"
    '{begin}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{end}'
)


class ToolChoice(StrEnum):
    """Whether a model may, must or must not call a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a client offers."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def as_text(self) -> str:
        """Return the tool as a model reads it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return orjson.dumps({"type": "function", "function": function | {"parameters": self.parameters}}).decode()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a model is told of, and what it may do with them."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    # Those that may be called: all, or the one that was named.
    callable_tools: tuple[Tool, ...]
    is_parallel: bool

    def constraint(self) -> OutputConstraint:
        """Return the grammar of an answer: any text with right calls in it, or nothing but calls."""
        return OutputConstraint(Grammar(GrammarForm.LARK, (_grammar_of(self),)), "tools")


def parse_tool_use(body: Mapping[str, Any]) -> ToolUse | None:
    """Return the tools of a request, or None when none may be called.

    Raises:
        InvalidRequest: the fields are wrong or contradict each other; names the field.
        UnsupportedField: a kind of tool or choice that is not served.
    """
    tools = _tools(body)
    is_parallel = PARALLEL_TOOL_CALLS.read(body)
    choice, named = _choice(body, tools)
    if choice is ToolChoice.NONE:
        return None
    return ToolUse(tools, choice, tools if named is None else (named,), is_parallel)


def describe_tools(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> tuple[ChatMessage, ...]:
    """Return the conversation with the tools at the end of its system message; one is added where there is none."""
    text = _INTRODUCTION.format(tools="\n".join(tool.as_text() for tool in tools), begin=CALL_BEGIN, end=CALL_END)
    first, rest = messages[0], tuple(messages[1:])
    if first.role == "system":
        return (ChatMessage("system", f"{first.content}\n\n{text}"), *rest)
    return (ChatMessage("system", text), *messages)


def call_text(name: str, arguments: str) -> str:
    """Return a call as a model writes it; ``arguments`` is JSON."""
    return f'{CALL_BEGIN}\n{{"name": {orjson.dumps(name).decode()}, "arguments": {arguments}}}\n{CALL_END}'


def result_text(content: str) -> str:
    """Return a tool's result as a model reads it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def read_tool_calls(values: Any, path: str) -> tuple[str, ...]:
    """Return the calls of an assistant's message as the model wrote them; none for null.

    Raises:
        InvalidRequest: they are no calls of functions with arguments that are a JSON object; names the field.
    """
    if values is None:
        return ()
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        raise InvalidRequest(f"'{path}' must be a list of at most {MAX_TOOLS} calls.", param=path)
    return tuple(_written_call(value, f"{path}[{index}]") for index, value in enumerate(values))


def _written_call(value: Any, path: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise InvalidRequest(f"'{path}' must be a call with 'id', 'type' and 'function'.", param=path)
    _refuse_others(value, _CALL_FIELDS, path)
    _refuse_others(function, _FUNCTION_FIELDS, f"{path}.function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(value.get("id"), str):
        raise InvalidRequest(f"'{path}.id' must be a string.", param=f"{path}.id")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"'{path}.function.name' must be a function's name.", param=f"{path}.function.name")
    if not isinstance(arguments, str) or not _is_object(arguments):
        raise InvalidRequest(
            f"'{path}.function.arguments' must be a JSON object as a string.", param=f"{path}.function.arguments"
        )
    return call_text(name, arguments)


def _refuse_others(value: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    for name in value.keys() - known:
        raise InvalidRequest(f"Unknown field '{path}.{name[:64]}'.", param=path)


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    values = body.get("tools")
    if values is None:
        return ()
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        raise InvalidRequest(f"'tools' must be a list of at most {MAX_TOOLS} tools.", param="tools")
    tools = tuple(_tool(value, f"tools[{index}]") for index, value in enumerate(values))
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("Each of 'tools' must have a name of its own.", param="tools")
    return tools


def _tool(value: Any, path: str) -> Tool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise InvalidRequest(f"'{path}' must be an object with 'type' and 'function'.", param=path)
    if value["type"] != "function":
        raise UnsupportedField(f"'{path}.type' must be 'function'.", param=f"{path}.type")
    function = value.get("function")
    if not isinstance(function, dict) or value.keys() - {"type", "function"}:
        raise InvalidRequest(f"'{path}' must have 'type' and 'function', an object, alone.", param=path)
    path = f"{path}.function"
    if function.keys() - {"name", "description", "parameters", "strict"}:
        raise InvalidRequest(f"'{path}' takes 'name', 'description', 'parameters' and 'strict' only.", param=path)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{path}.name' must be a string of 1 to 64 letters, digits, '_' and '-'.", param=f"{path}.name"
        )
    if description is not None and (
        not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS
    ):
        raise InvalidRequest(
            f"'{path}.description' must be a string of at most {MAX_DESCRIPTION_CHARACTERS} characters.",
            param=f"{path}.description",
        )
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"'{path}.strict' must be true or false.", param=f"{path}.strict")
    return Tool(name, description, _parameters(function.get("parameters"), f"{path}.parameters"))


def _parameters(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        # OpenAI: without parameters a function takes none.
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise InvalidRequest(f"'{path}' must be a JSON schema of the type 'object'.", param=path)
    parameters = {"type": "object"} | value
    try:
        check_grammar(Grammar(GrammarForm.JSON_SCHEMA, (orjson.dumps(parameters).decode(),)))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=path) from error
    return parameters


def _choice(body: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[ToolChoice, Tool | None]:
    value = body.get("tool_choice")
    if value is None:
        return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
    if isinstance(value, dict):
        return ToolChoice.REQUIRED, _named_tool(value, tools)
    if not isinstance(value, str) or value not in set(ToolChoice):
        raise InvalidRequest(
            "'tool_choice' must be 'none', 'auto', 'required' or an object that names a function.",
            param="tool_choice",
        )
    choice = ToolChoice(value)
    if choice is ToolChoice.REQUIRED and not tools:
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
    return (choice if tools else ToolChoice.NONE), None


def _named_tool(value: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = value.get("function")
    if value.get("type") != "function" or not isinstance(function, dict):
        raise UnsupportedField(
            '\'tool_choice\' as an object must be {"type": "function", "function": {"name": …}}.',
            param="tool_choice",
        )
    _refuse_others(value, _CHOICE_FIELDS, "tool_choice")
    _refuse_others(function, frozenset({"name"}), "tool_choice.function")
    for tool in tools:
        if tool.name == function.get("name"):
            return tool
    raise InvalidRequest("'tool_choice' names a function that is not among 'tools'.", param="tool_choice")


def _grammar_of(use: ToolUse) -> str:
    """Return the grammar in llguidance's Lark; every call is what ``call_text`` writes."""
    rules = []
    for index, tool in enumerate(use.callable_tools):
        begin = f'\n{{"name": "{tool.name}", "arguments": '
        schema = orjson.dumps(dict(tool.parameters) | {"x-guidance": JSON_OPTIONS}).decode()
        rules += [
            f"call_{index}: {_literal(begin)} arguments_{index} {_literal('}' + chr(10) + CALL_END)}",
            f"arguments_{index}: %json {schema}",
        ]
    body = " | ".join(f"call_{index}" for index in range(len(use.callable_tools)))
    if use.choice is ToolChoice.REQUIRED:
        start = "call" if not use.is_parallel else f'call ("\\n" call){{0,{MAX_CALLS - 1}}}'
        head = [f"call: {_literal(CALL_BEGIN)} ({body})"]
    else:
        start = "call* rest" if use.is_parallel else "call | rest"
        # Lazy: as soon as a call begins, the text before it is over.
        head = [
            f"call: before_call ({body})",
            f"before_call[lazy]: TEXT {_literal(CALL_BEGIN)}",
            "rest: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
    return "\n".join(["%llguidance {}", f"start: {start}", *head, *rules])


def _literal(text: str) -> str:
    return orjson.dumps(text).decode()
