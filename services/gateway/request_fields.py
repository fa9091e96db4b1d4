"""Fields of a JSON request as objects: what reads a value is what describes it.

Owns the types of fields that stand alone: a name, bounds, a default and a sentence, from which both the check and
the JSON schema of ``/openapi.json`` follow. It must not know which endpoint has which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.gateway.openai_values import read_boolean, read_integer, read_number

JsonSchema: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BooleanField:
    """True or false; null counts as left out."""

    name: str
    default: bool
    description: str

    def read(self, body: Mapping[str, Any], path: str = "") -> bool:
        """Return the value; raises InvalidRequest for one of another type."""
        return read_boolean(body, self.name, default=self.default, path=path)

    def schema(self) -> JsonSchema:
        """Return the schema of its values."""
        return {"type": ["boolean", "null"], "default": self.default, "description": self.description}


@dataclass(frozen=True, slots=True)
class NumberField:
    """A finite number between two bounds, both of them allowed."""

    name: str
    low: float
    high: float
    default: float
    description: str

    def read(self, body: Mapping[str, Any]) -> float:
        """Return the value; raises InvalidRequest for one of another type or out of bounds."""
        return read_number(body, self.name, default=self.default, low=self.low, high=self.high)

    def schema(self) -> JsonSchema:
        """Return the schema of its values."""
        return {
            "type": ["number", "null"],
            "minimum": self.low,
            "maximum": self.high,
            "default": self.default,
            "description": self.description,
        }


@dataclass(frozen=True, slots=True)
class IntegerField:
    """An integer between two bounds, both of them allowed; without it None."""

    name: str
    low: int
    high: int
    description: str
    # What the reader's None amounts to, for the document; None where it is nothing that could be sent.
    default: int | None = None

    def read(self, body: Mapping[str, Any]) -> int | None:
        """Return the value; raises InvalidRequest for one of another type or out of bounds."""
        return read_integer(body, self.name, low=self.low, high=self.high)

    def schema(self) -> JsonSchema:
        """Return the schema of its values."""
        return {
            "type": ["integer", "null"],
            "minimum": self.low,
            "maximum": self.high,
            "default": self.default,
            "description": self.description,
        }


RequestField: TypeAlias = BooleanField | NumberField | IntegerField
