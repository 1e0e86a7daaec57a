"""Settings check their fields wherever they are made: from a file, from JSON, by a constructor or by `replace`."""

import pickle
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import Fraction, Location, Size, SizeOrEmpty, Text, settings, size_bytes


@settings
class Part:
    """A section."""

    heads: PositiveInt = 4
    share: Fraction = 0.5


@settings
class Whole:
    """Settings with a section."""

    key: ClassVar = "whole"
    part: Part = field(default_factory=Part)
    paths: tuple[Text, ...] = ()
    folder: Location = Path("a")
    memory: SizeOrEmpty = ""
    budget: Size = "4GB"
    zero: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        if self.zero and not self.paths:
            raise InputError("whole.zero = 1 needs paths.")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"part": {"heads": 0}}, "whole.part.heads = 0: should be greater than 0"),
        ({"part": {"share": 1.5}}, "whole.part.share = 1.5"),
        ({"part": {"share": float("nan")}}, "whole.part.share = NaN"),
        ({"part": {"header": 1}}, "whole.part.header"),
        ({"paths": ["a", ""]}, 'whole.paths[1] = ""'),
        ({"folder": ""}, 'whole.folder = ""'),
        ({"budget": ""}, 'whole.budget = "": should not be empty'),
        ({"memory": "5 apples"}, "whole.memory = \"5 apples\": should be a size such as '500MB'"),
        ({"zero": 2}, "whole.zero = 2: should be 0 or 1"),
        ({"zero": 1}, "whole.zero = 1 needs paths."),
    ],
)
def test_a_mistake_is_an_input_error_with_key_value_and_what_is_accepted(values: dict[str, Any], words: str) -> None:
    for made in (lambda: Whole(**values), lambda: replace(Whole(), **values)):
        with pytest.raises(InputError) as caught:
            made()
        assert words in str(caught.value)


def test_what_json_holds_becomes_sections_tuples_and_paths() -> None:
    assert Whole(part={"heads": 2}, paths=["b"], folder="c") == Whole(Part(2), ("b",), Path("c"))  # type: ignore[arg-type]


def test_settings_are_frozen_values_that_other_processes_can_read() -> None:
    whole = Whole(memory="16GB")
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert hash(whole) == hash(Whole(memory="16GB"))
    with pytest.raises(AttributeError):
        whole.zero = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"), [("", 0), ("12B", 12), ("1.5 KB", 1500), ("80GB", 80 * 10**9), ("2TB", 2 * 10**12)]
)
def test_sizes_are_powers_of_1000(text: str, size: int) -> None:
    assert size_bytes(text) == size
