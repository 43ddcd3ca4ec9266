"""The base class of every section of a recipe, and lists of names as people type them."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _names(value: object) -> object:
    """The names in a list as people type it into a shell: `wandb`, `wandb,mlflow`, `[wandb]`."""
    if not isinstance(value, str):
        return value
    inner = value.strip()
    if inner[:1] + inner[-1:] == "[]":  # not the end of a pattern, as `blocks.[01]`
        inner = inner[1:-1]
    parts = [inner] if ":" in inner else inner.split(",")  # lm-eval:TASK,TASK is one name
    return [name for part in parts if (name := part.strip().strip("'\""))]


Names = BeforeValidator(_names)


class Frozen(BaseModel):
    """Settings that do not change; `Recipe.replace` makes a changed copy."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Section(Frozen):
    """A part of a recipe; a field's docstring is its documentation."""

    model_config = ConfigDict(validate_default=True)
