"""Reader for config.json: typed access to its keys, with errors that name file, key, value and accepted values."""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from indexing.store.errors import InputError
from indexing.tokenization.backends import read_object

Value = TypeVar("Value")
_LONGEST = 200  # characters of a value in a message


class Config:
    """Values of a config.json: `Config(file, values)` or `Config.open(folder)`. Null counts as missing, as
    in `transformers`."""

    def __init__(self, file: Path | str, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values

    @classmethod
    def open(cls, folder: Path) -> "Config":
        """Open the config.json of a folder.

        Raises:
            InputError: it is missing or not a JSON object.
        """
        file = folder / "config.json"
        if not file.is_file():
            raise InputError(f"{file} is missing: name a local folder with a model in Hugging Face format.")
        return cls(file, read_object(file))

    def part(self, key: str) -> "Config":
        """Return the object under a key; empty if the key is missing."""
        values = self.values.get(key) or {}
        if not isinstance(values, Mapping):
            self.refuse(key, "an object")
        return Config(f"{self.file}: {key}", values)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer above 0; a key without a default is required."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "an integer above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def choice(self, key: str, accepted: Mapping[str, Value], default: str) -> Value:
        """Return the value that `accepted` has for a string."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in accepted:
            self.refuse(key, ", ".join(accepted))
        return accepted[value]

    def only(self, key: str, accepted: object) -> None:
        """Reject all values except one, which is also the default."""
        if self._value(key, accepted) != accepted:
            self.refuse(key, repr(accepted))

    def refuse(self, key: str, accepted: str) -> NoReturn:
        """Raise InputError that names file, key, value and accepted values."""
        value = repr(self.values[key])[:_LONGEST] if key in self.values else "missing"
        raise InputError(f"{self.file}: {key} is {value}; accepted: {accepted}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value
