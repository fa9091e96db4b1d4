"""Which of the served model's names a tenant may use. Owns the rule; it must not know requests."""

from __future__ import annotations

from libs.errors import ModelNotFound
from services.gateway.identity import Tenant
from services.gateway.openai_schema import ModelFacts, shown_name


def names_for(tenant: Tenant, model: ModelFacts) -> tuple[str, ...]:
    """Return the names that a tenant may use: all with the model's own on its list, else those on it."""
    allowed = tenant.allowed_models
    if allowed is None or model.name in allowed:
        return model.all_names
    return tuple(name for name in model.all_names if name in allowed)


def check_access(tenant: Tenant, model: ModelFacts, name: str | None) -> None:
    """Refuse a name that a tenant may not use, as if there were no such model; None stands for any of its names.

    Raises:
        ModelNotFound: it may not.
    """
    names = names_for(tenant, model)
    if not (names if name is None else name in names):
        shown = shown_name(model.name if name is None else name)
        raise ModelNotFound(f"The model {shown!r} does not exist or you do not have access to it.", param="model")
