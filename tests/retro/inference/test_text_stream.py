"""Text streaming: all text is shown, and nothing that a later token changes or that belongs to a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retro.inference.text_stream import TextStream

few = settings(max_examples=200, deadline=None, derandomize=True)
texts = st.text("ab檢🙂\ufffd ", max_size=12)


def decode(tokens) -> str:
    """Tokens 0 to 255 are bytes, invalid bytes become U+FFFD, and larger tokens are two letters."""
    data = b"".join(bytes([token]) if token < 256 else b"ab" for token in tokens)
    return data.decode(errors="replace")


def stream_text(tokens: list[int], prompt: list[int] = (), stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The text shown after each token and at the end, and whether a stop string was found."""
    stream, pieces = TextStream(decode, prompt, stop), []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.rest()], stream.stopped


@few
@given(texts, st.binary(max_size=6))
def test_the_whole_text_is_shown(text: str, junk: bytes) -> None:
    tokens = list(text.encode() + junk + text.encode())
    pieces, stopped = stream_text(tokens)
    assert "".join(pieces) == decode(tokens)
    assert not stopped


@few
@given(texts, texts.filter(lambda stop: stop), texts.filter(lambda stop: stop))
def test_text_ends_before_the_first_stop_string(text: str, one: str, other: str) -> None:
    pieces, stopped = stream_text(list(text.encode()), stop=(one, other))
    whole = "".join(pieces)
    assert stopped == (one in text or other in text)
    if stopped:
        assert text.startswith(whole)
        assert one not in whole
        assert other not in whole
        assert text[len(whole) :].startswith((one, other))
    else:
        assert whole == text


def test_an_incomplete_character_is_held_back() -> None:
    assert stream_text(list("a檢🙂".encode()))[0] == ["a", "", "", "檢", "", "", "", "🙂", ""]
    assert stream_text(list("檢".encode()[:2]))[0] == ["", "", decode("檢".encode()[:2])]


def test_a_character_started_by_the_prompt_is_shown_whole() -> None:
    first, *rest = "檢".encode()
    assert stream_text(rest, prompt=[97, first])[0] == ["", "檢", ""]


def test_a_possible_stop_string_is_held_back_and_may_span_tokens() -> None:
    assert stream_text(list(b"xaby"), stop=("abc",))[0] == ["x", "", "", "aby", ""]
    assert stream_text([120, 256, 99, 120], stop=("bc",)) == (["x", "a", "", ""], True)
    assert stream_text([256, 256], stop=("ba",)) == (["a", "", ""], True)


def test_stop_strings_in_the_prompt_are_ignored() -> None:
    assert stream_text(list(b"cd"), prompt=list(b"ab"), stop=("ab", "bc")) == (["c", "d", ""], False)


def test_old_tokens_are_not_decoded_again() -> None:
    longest = 0

    def measuring(tokens) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    stream = TextStream(measuring, [97])
    assert "".join(stream.add(byte) for byte in "檢查 ".encode() * 50) == "檢查 " * 50
    assert longest <= 12


def test_a_space_that_depends_on_the_previous_token_is_kept() -> None:
    def sentence(tokens) -> str:
        return " ".join("word" for _ in tokens)  # like tokenizers that drop the first space

    stream = TextStream(sentence, [1])
    assert [stream.add(1) for _ in range(9)] == [" word"] * 9
    assert [TextStream(sentence, []).add(1)] == ["word"]


@pytest.mark.parametrize("stop", [("檢",), ("\ufffd",)])
def test_a_stop_string_does_not_match_an_incomplete_character(stop: tuple[str, ...]) -> None:
    pieces, stopped = stream_text([*"🙂".encode(), 97], stop=stop)
    assert ("".join(pieces), stopped) == ("🙂a", False)
