"""The tools of a conversation: what clients offer, and what a model may do with them.

Owns what the fields of all APIs have in common: names, schemas, choices and their bounds. It must not know how a
model hears of tools or calls them, nor how an answer is read or written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from libs.errors import InvalidRequest, UnsupportedField
from libs.grammar import Grammar, GrammarForm, check_grammar
from libs.text import ChatMessage, ToolCall
from services.gateway.openai_values import schema_text

MAX_TOOLS: Final = 128
# Some agents describe a tool in more than 10,000.
MAX_DESCRIPTION_CHARACTERS: Final = 65_536
MAX_ARGUMENTS_DEPTH: Final = 128

# Of a call that was made. One that a client put together from a stream has its place in the message, and OpenAI's
# clients add what they have read out of the arguments.
_CALL_FIELDS: Final = frozenset({"id", "type", "function", "index"})
_FUNCTION_FIELDS: Final = frozenset({"name", "arguments", "parsed_arguments"})
_CHOICE_FIELDS: Final = frozenset({"type", "function"})
NAME_PATTERN: Final = "^[a-zA-Z0-9_-]{1,64}$"
_NAME: Final = re.compile(NAME_PATTERN.strip("^$"))
# For the bodies that are types. Agents that speak Anthropic's dialect put names of servers before those of tools.
FunctionName: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
LongFunctionName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
FunctionDescription: TypeAlias = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARACTERS)]
_SHOWN_ID_CHARACTERS: Final = 64


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
    # Arguments must be valid for their schema; where they can be held to it they always are.
    is_strict: bool = False
    # Where the request has its parameters, for what cannot be enforced.
    parameters_path: str = "tools"

    def as_value(self) -> dict[str, Any]:
        """Return the tool as templates and models read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a model is told of, and what it may do with them."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    # Those that may be called: all, or those that the choice names.
    callable_tools: tuple[Tool, ...]
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions that may be called."""
        return frozenset(tool.name for tool in self.callable_tools)


def read_tools(values: Any, path: str) -> tuple[Tool, ...]:
    """Return OpenAI's list of functions; none for null.

    Raises:
        InvalidRequest: the list is wrong; names the field.
        UnsupportedField: a kind of tool that is not served.
    """
    if values is None:
        return ()
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        raise InvalidRequest(f"'{path}' must be a list of at most {MAX_TOOLS} tools.", param=path)
    return with_own_names([_function_tool(value, f"{path}[{index}]") for index, value in enumerate(values)], path)


def with_own_names(tools: Sequence[Tool], path: str) -> tuple[Tool, ...]:
    """Return tools of which no two have one name; raises InvalidRequest for others."""
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest(f"Each of '{path}' must have a name of its own.", param=path)
    return tuple(tools)


def make_tool(
    *, name: str, description: Any, parameters: Any, strict: Any, path: str, parameters_name: str = "parameters"
) -> Tool:
    """Return a function whose description stands at ``path``; raises InvalidRequest for a wrong one.

    How names may be is each dialect's own, and was checked.
    """
    if description is not None and (
        not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS
    ):
        raise InvalidRequest(
            f"'{path}.description' must be a string of at most {MAX_DESCRIPTION_CHARACTERS} characters.",
            param=f"{path}.description",
        )
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"'{path}.strict' must be true or false.", param=f"{path}.strict")
    parameters_path = f"{path}.{parameters_name}"
    return Tool(name, description, _parameters(parameters, parameters_path), bool(strict), parameters_path)


def make_tool_use(
    tools: Sequence[Tool], choice: ToolChoice | None, *, only: Sequence[str] | None, is_parallel: bool
) -> ToolUse | None:
    """Return what a model may do, or None when it may call nothing.

    Without a ``choice`` it may call where there are tools; ``only`` names those that may be called.

    Raises:
        InvalidRequest: the choice has no tool to choose.
    """
    chosen = choice or (ToolChoice.AUTO if tools else ToolChoice.NONE)
    if chosen is ToolChoice.REQUIRED and not tools:
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
    by_name = {tool.name: tool for tool in tools}
    if only is not None and not (only and all(name in by_name for name in only)):
        raise InvalidRequest("'tool_choice' names a function that is not among 'tools'.", param="tool_choice")
    if chosen is ToolChoice.NONE or not tools:
        return None
    callable_tools = tuple(tools) if only is None else tuple(by_name[name] for name in dict.fromkeys(only))
    return ToolUse(tuple(tools), chosen, callable_tools, is_parallel)


def read_choice(value: Any) -> tuple[ToolChoice | None, tuple[str, ...] | None]:
    """Return OpenAI's ``tool_choice`` of a chat, and the functions that it names if it names any.

    Raises:
        InvalidRequest: it is none.
        UnsupportedField: it chooses what is no function.
    """
    if value is None:
        return None, None
    if isinstance(value, str) and value in set(ToolChoice):
        return ToolChoice(value), None
    if not isinstance(value, dict):
        raise InvalidRequest(
            "'tool_choice' must be 'none', 'auto', 'required' or an object that names a function.",
            param="tool_choice",
        )
    if value.get("type") == "allowed_tools":
        _refuse_others(value, frozenset({"type", "allowed_tools"}), "tool_choice")
        return _allowed_tools(value.get("allowed_tools"))
    return ToolChoice.REQUIRED, (_named_function(value, "tool_choice"),)


def _allowed_tools(value: Any) -> tuple[ToolChoice, tuple[str, ...]]:
    path = "tool_choice.allowed_tools"
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.get("mode") not in ("auto", "required") or not isinstance(tools, list):
        raise InvalidRequest(f"'{path}' must have a 'mode', 'auto' or 'required', and 'tools'.", param=path)
    names = tuple(_named_function(tool, f"{path}.tools[{index}]") for index, tool in enumerate(tools))
    _refuse_others(value, frozenset({"mode", "tools"}), path)
    return ToolChoice(value["mode"]), names


def _named_function(value: Any, path: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        raise UnsupportedField(
            f'\'{path}\' as an object must be {{"type": "function", "function": {{"name": …}}}}.', param=path
        )
    _refuse_others(value, _CHOICE_FIELDS, path)
    _refuse_others(function, frozenset({"name"}), f"{path}.function")
    return str(function.get("name"))


def read_tool_calls(values: Any, path: str) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message; none for null.

    Raises:
        InvalidRequest: they are no calls of functions with arguments that are a JSON object; names the field.
    """
    if values is None:
        return ()
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        raise InvalidRequest(f"'{path}' must be a list of at most {MAX_TOOLS} calls.", param=path)
    return tuple(_tool_call(value, f"{path}[{index}]") for index, value in enumerate(values))


def _tool_call(value: Any, path: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise InvalidRequest(f"'{path}' must be a call with 'id', 'type' and 'function'.", param=path)
    _refuse_others(value, _CALL_FIELDS, path)
    _refuse_others(function, _FUNCTION_FIELDS, f"{path}.function")
    call_id, arguments = value.get("id"), function.get("arguments")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"'{path}.id' must be a string.", param=f"{path}.id")
    name = _name(function.get("name"), f"{path}.function.name")
    return make_tool_call(call_id, name, arguments, f"{path}.function")


def make_tool_call(
    call_id: str, name: str, arguments: Any, path: str, *, arguments_name: str = "arguments"
) -> ToolCall:
    """Return a call whose arguments stand at ``path``; raises InvalidRequest for wrong ones."""
    return ToolCall(call_id, name, _arguments_text(arguments, f"{path}.{arguments_name}"))


def _arguments_text(arguments: Any, path: str) -> str:
    """Return arguments as JSON: clients send an empty text for none, and some the object itself."""
    if isinstance(arguments, str):
        text: str | None = arguments if arguments.strip() else "{}"
    else:
        text = _as_json(arguments)
    if text is None or not _is_object(text):
        raise InvalidRequest(f"'{path}' must be a JSON object as a string.", param=path)
    if _depth(text) > MAX_ARGUMENTS_DEPTH:
        raise InvalidRequest(f"'{path}' is nested more than {MAX_ARGUMENTS_DEPTH} levels deep.", param=path)
    try:
        # As it is read for templates: whole numbers stay whole, and so are bounded in length.
        json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"'{path}' has a number of too many digits.", param=path) from error
    return text


def _as_json(value: Any) -> str | None:
    """Return a value as JSON; None for one nested so deep that it cannot be written."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        return None


def _depth(text: str) -> int:
    """Return how deep JSON is nested, at most as many levels as it has brackets."""
    num_brackets = text.count("{") + text.count("[")
    if num_brackets <= MAX_ARGUMENTS_DEPTH:
        return num_brackets
    depth, level = 0, [orjson.loads(text)]
    while level and depth <= MAX_ARGUMENTS_DEPTH:
        depth += 1
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for some in parts for part in some if isinstance(part, dict | list)]
    return depth


def check_results(messages: Sequence[ChatMessage], param: str) -> None:
    """Refuse a tool's result that answers no call before it; raises InvalidRequest."""
    called: set[str] = set()
    for message in messages:
        called.update(call.call_id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            shown = (message.tool_call_id or "")[:_SHOWN_ID_CHARACTERS]
            raise InvalidRequest(
                f"'{param}' has a result of the call {shown!r}, and no such call before it.", param=param
            )


def _refuse_others(value: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    for name in value.keys() - known:
        raise InvalidRequest(f"Unknown field '{path}.{name[:64]}'.", param=path)


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _function_tool(value: Any, path: str) -> Tool:
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
    return make_tool(
        name=_name(function.get("name"), f"{path}.name"),
        description=function.get("description"),
        parameters=function.get("parameters"),
        strict=function.get("strict"),
        path=path,
    )


def _name(name: Any, path: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"'{path}' must be a string of 1 to 64 letters, digits, '_' and '-'.", param=path)
    return name


def _parameters(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        # OpenAI: without parameters a function takes none.
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise InvalidRequest(f"'{path}' must be a JSON schema of the type 'object'.", param=path)
    parameters = {"type": "object"} | value
    text = schema_text(parameters, path)
    try:
        check_grammar(Grammar(GrammarForm.JSON_SCHEMA, (text,)))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=path) from error
    # An integer of more than 64 bits is a float from here on, as compilers of grammars read it.
    as_read: dict[str, Any] = orjson.loads(text)
    return as_read
