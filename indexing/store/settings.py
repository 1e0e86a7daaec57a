"""Settings: frozen dataclasses whose fields state what they accept, checked by pydantic.

    steps: PositiveInt = 1000
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    zero: Literal[0, 1, 2, 3] = 0

`__post_init__` checks relations between fields and raises InputError. Files and the command line cannot set a field
with the metadata `NOT_A_KEY`: a program or the file of a model sets it.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from indexing.store.errors import InputError

T = TypeVar("T")

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]


def _text(text: str) -> str:
    if not text:
        raise ValueError("should not be empty")
    return text


def size_bytes(text: str) -> int:
    """Bytes of a size such as `16GB`, with powers of 1000; 0 for the empty text.

    Raises:
        ValueError: it has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B", text or "0B")
    if not match:
        raise ValueError("should be a size such as '500MB' or '16GB'")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " "))


def _size(text: str) -> str:
    size_bytes(text)
    return text


Text = Annotated[str, AfterValidator(_text)]
"""Not empty. pydantic's `min_length` refuses file names that are not UTF-8."""
Location = Annotated[Path, BeforeValidator(lambda path: path if isinstance(path, Path) else _text(path))]
"""A path or URL that is not empty: an empty one would be the current folder."""
Size = Annotated[Text, AfterValidator(_size)]
"""Bytes with a unit, as text."""
SizeOrEmpty = Annotated[str, AfterValidator(_size)]

NOT_A_KEY: Mapping[str, Any] = {"is_key": False}


def key_fields(kind: Any) -> list["dataclasses.Field[Any]"]:
    """The fields of a class of settings, or of an instance, that files and the command line can set."""
    return [one for one in dataclasses.fields(kind) if one.metadata.get("is_key", True)]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks its fields, also with `dataclasses.replace`.

    A constructor converts values without loss (a list to a tuple, a string to a path, JSON's dict to a section) and
    raises InputError with the key, the value and what is accepted. A class attribute `key` is the name of its section
    in messages.
    """
    checked: Any = pydantic.dataclasses.dataclass(kind, frozen=True, config=ConfigDict(extra="forbid"))
    construct = checked.__init__

    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except ValidationError as error:
            raise InputError(mistake(error, getattr(kind, "key", ""))) from error

    checked.__init__ = __init__
    return checked


def mistake(error: ValidationError, key: str = "") -> str:
    """The first mistake in words: `key = value: should be …`; `key` is what precedes pydantic's path."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # from a `__post_init__`; it names the keys
        return str(cause)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    name = f"{key}{path}".removeprefix(".")
    if first["type"] == "unexpected_keyword_argument":
        return f"{name}: this version of retro has no such setting."
    if first["type"] == "missing":  # an item of a list, or an option
        return f"{name} is missing." if name.endswith("]") else f"{name} is required: set --{name.replace('_', '-')}."
    # Words of the command line are shown as they are, values of files and code with their types.
    value = first["input"] if name.startswith("--") else json.dumps(first["input"], ensure_ascii=False, default=str)
    accepted = re.sub("^(Value error,|Input|String|Tuple) ", "", first["msg"])
    return f"{name} = {value}: {accepted}."
