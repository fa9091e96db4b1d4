"""The served model as OpenAI's objects, under each of the names that a tenant may use. Owns their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.gateway.identity import Tenant
from services.gateway.model_access import check_access, names_for
from services.gateway.openai_schema import ModelFacts, check_model_name


class Models:
    """Lists and finds."""

    def __init__(self, model: ModelFacts, *, max_model_len: Callable[[], int], start_time: int) -> None:
        """Take the model; ``start_time`` is the Unix time that its objects have, ``max_model_len`` in tokens."""
        self._model = model
        self._max_model_len = max_model_len
        self._start_time = start_time

    @property
    def facts(self) -> ModelFacts:
        """What schemas know of the model."""
        return self._model

    def of_tenant(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Return one object for each name that the tenant may use."""
        return [self._object(name) for name in names_for(tenant, self._model)]

    def named(self, name: str, tenant: Tenant) -> dict[str, Any]:
        """Return the object of one name; raises ModelNotFound."""
        check_model_name(name, self._model)
        check_access(tenant, self._model, name)
        return self._object(name)

    def _object(self, name: str) -> dict[str, Any]:
        return model_object(
            name=name,
            root=self._model.name,
            created=self._start_time,
            max_model_len=self._max_model_len(),
        )


def model_object(*, name: str, root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return OpenAI's model object, with the model's own name and its context beside."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "octavo",
        "root": root,
        "max_model_len": max_model_len,
    }
