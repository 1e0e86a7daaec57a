"""Text streaming: all text is shown, and nothing that a later token changes or that belongs to a stop string."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.tokenization.tokenizer import Tokenizer, TokenizerSettings, install_tokenizer
from retro.inference.spans import token_ends
from retro.inference.text_stream import TextStream
from tests.indexing.tokenization.test_extension import BASES

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


@pytest.fixture(scope="module", params=list(BASES))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    source: Path = BASES[request.param](folder / "source")
    kind = "huggingface" if (source / "tokenizer.json").is_file() else "sentencepiece"
    install_tokenizer(TokenizerSettings(kind=kind, path=str(source)), folder / "installed")
    return Tokenizer.open(folder / "installed")


def random_texts(count: int) -> list[str]:
    """Words, blanks, and characters of two to four bytes."""
    draw = random.Random(0)
    letters = ["the ", "a", " ", ".", "世", "界", "檢", "é", "ж", "🙂", "👩", "\u200d", "\U00020bb7"]
    return ["b" + "".join(draw.choices(letters, k=draw.randint(1, 20))) + "." for _ in range(count)]


def test_streamed_pieces_of_every_tokenizer_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    for number, text in enumerate(random_texts(60)):
        prompt = tokenizer.encode("so ").tolist()
        whole = prompt + tokenizer.encode(text).tolist()
        stream = TextStream(tokenizer.decode, prompt)
        pieces = [stream.add(token) for token in whole[len(prompt) :]]
        assert "".join(pieces) == tokenizer.decode(whole)[len(tokenizer.decode(prompt)) :]  # complete without `rest`
        if tokenizer.decode(tokenizer.encode(text)) == text:
            assert text in tokenizer.decode(whole)
        else:
            assert tokenizer.meta.kind == "sentencepiece"  # normalizes
        cut = whole[: len(prompt) + number % len(whole)]  # also within a character
        stream = TextStream(tokenizer.decode, prompt)
        pieces = [*(stream.add(token) for token in cut[len(prompt) :]), stream.rest()]
        assert "".join(pieces) == tokenizer.decode(cut)[len(tokenizer.decode(prompt)) :]


def test_streamed_pieces_of_arbitrary_tokens_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    draw, prompt = random.Random(0), tokenizer.encode("so").tolist()
    for _ in range(60):  # most sequences of byte tokens are invalid
        ids = [draw.randrange(tokenizer.num_model_tokens) for _ in range(20)]
        stream = TextStream(tokenizer.decode, prompt)
        text = "".join([*map(stream.add, ids), stream.rest()])
        assert text == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


def test_an_incomplete_character_leaves_the_text_before_it_as_it_is(tokenizer: Tokenizer) -> None:
    for text in random_texts(20):
        tokens = tokenizer.encode(text)
        prefixes = [tokenizer.decode(tokens[:stop]).rstrip("\ufffd") for stop in range(len(tokens) + 1)]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(prefixes))


def test_whole_characters_are_counted_for_every_token(tokenizer: Tokenizer) -> None:
    for text in ["the 世界 🙂 " * 12, *random_texts(20)]:
        tokens = tokenizer.encode(text)
        found, ends = token_ends(tokenizer.decode_batch, tokens)
        assert found == tokenizer.decode(tokens)
        prefixes = [tokenizer.decode(tokens[: stop + 1]).rstrip("\ufffd") for stop in range(len(tokens))]
        assert ends == [len(prefix) for prefix in prefixes]
