"""A config.json, read key by key: what a decoder of ours cannot be is refused by file, key, what was found and what is accepted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from indexing.store.errors import InputError
from indexing.tokenization.backends import read_object

Value = TypeVar("Value")


class Config:
    """`Config(file, values)`, or `Config.open(folder)`. A key that is null counts as missing, as it does for `transformers`."""

    def __init__(self, file: Path | str, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values

    @classmethod
    def open(cls, folder: Path) -> "Config":
        """The config.json of a folder.

        Raises:
            InputError: there is none, or it is no JSON object.
        """
        file = folder / "config.json"
        if not file.is_file():
            raise InputError(f"{file} is missing: name a local folder with a model in Hugging Face format.")
        return cls(file, read_object(file))

    def part(self, key: str) -> "Config":
        """The object under a key; empty where there is none."""
        values = self.values.get(key) or {}
        if not isinstance(values, Mapping):
            self.refuse(key, "an object")
        return Config(f"{self.file}: {key}", values)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; without a default it must be there."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self.refuse(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def choice(self, key: str, accepted: Mapping[str, Value], default: str) -> Value:
        """What a word stands for."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in accepted:
            self.refuse(key, ", ".join(accepted))
        return accepted[value]

    def only(self, key: str, accepted: Any) -> None:
        """Refuse all values but one, which is the default too."""
        if self._value(key, accepted) != accepted:
            self.refuse(key, repr(accepted))

    def refuse(self, key: str, accepted: str) -> NoReturn:
        """Raise InputError."""
        found = repr(self.values[key]) if key in self.values else "missing"
        raise InputError(f"{self.file}: {key} is {found}; accepted: {accepted}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value
