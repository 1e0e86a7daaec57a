"""Text that grows: everything is shown in the end, nothing is shown that a later token changes or a stop string holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retro.inference.text_stream import TextStream

few = settings(max_examples=200, deadline=None, derandomize=True)
texts = st.text("ab檢🙂\ufffd ", max_size=12)


def decode(tokens) -> str:
    """Tokens 0 to 255 are bytes, one that is no character each a U+FFFD; larger ones stand for two letters."""
    data = b"".join(bytes([token]) if token < 256 else b"ab" for token in tokens)
    return data.decode(errors="replace")


def shown(tokens: list[int], prompt: list[int] = (), stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What each token shows and what comes at the end, and whether a stop string was found; no token follows one."""
    stream, pieces = TextStream(decode, prompt, stop), []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.rest()], stream.stopped


@few
@given(texts, st.binary(max_size=6))
def test_all_that_is_shown_is_the_text(text: str, junk: bytes) -> None:
    tokens = list(text.encode() + junk + text.encode())
    pieces, stopped = shown(tokens)
    assert "".join(pieces) == decode(tokens)
    assert not stopped


@few
@given(texts, texts.filter(lambda stop: stop), texts.filter(lambda stop: stop))
def test_what_is_shown_ends_where_the_first_stop_string_begins(text: str, one: str, other: str) -> None:
    pieces, stopped = shown(list(text.encode()), stop=(one, other))
    whole = "".join(pieces)
    assert stopped == (one in text or other in text)
    if stopped:
        assert text.startswith(whole)
        assert one not in whole
        assert other not in whole
        assert text[len(whole) :].startswith((one, other))
    else:
        assert whole == text


def test_half_a_character_waits_for_the_rest() -> None:
    assert shown(list("a檢🙂".encode()))[0] == ["a", "", "", "檢", "", "", "", "🙂", ""]
    assert shown(list("檢".encode()[:2]))[0] == ["", "", decode("檢".encode()[:2])]


def test_a_character_that_the_prompt_began_is_shown_whole() -> None:
    first, *rest = "檢".encode()
    assert shown(rest, prompt=[97, first])[0] == ["", "檢", ""]


def test_what_may_begin_a_stop_string_waits_and_a_stop_string_may_lie_across_tokens() -> None:
    assert shown(list(b"xaby"), stop=("abc",))[0] == ["x", "", "", "aby", ""]
    assert shown([120, 256, 99, 120], stop=("bc",)) == (["x", "a", "", ""], True)
    assert shown([256, 256], stop=("ba",)) == (["a", "", ""], True)


def test_a_stop_string_of_the_prompt_does_not_count() -> None:
    assert shown(list(b"cd"), prompt=list(b"ab"), stop=("ab", "bc")) == (["c", "d", ""], False)


def test_old_tokens_are_not_decoded_again() -> None:
    longest = 0

    def measuring(tokens) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    stream = TextStream(measuring, [97])
    assert "".join(stream.add(byte) for byte in "檢查 ".encode() * 50) == "檢查 " * 50
    assert longest <= 12


def test_a_blank_that_depends_on_what_stands_before_is_right() -> None:
    def sentence(tokens) -> str:
        return " ".join("word" for _ in tokens)  # as tokenizers that drop the first blank

    stream = TextStream(sentence, [1])
    assert [stream.add(1) for _ in range(9)] == [" word"] * 9
    assert [TextStream(sentence, []).add(1)] == ["word"]


@pytest.mark.parametrize("stop", [("檢",), ("\ufffd",)])
def test_a_stop_string_is_not_found_in_half_a_character(stop: tuple[str, ...]) -> None:
    pieces, stopped = shown([*"🙂".encode(), 97], stop=stop)
    assert ("".join(pieces), stopped) == ("🙂a", False)
