"""Cut a long text into pieces whose tokens, one after the other, are those of the whole text.

Tokenizers need about fifty bytes of memory for each byte of a text. So a long text is tokenized piece by piece. A piece
ends at a line or a blank. Not every such place is safe: a token may contain blanks, a tokenizer may put a blank in
front of every text, or join a line end with the punctuation before it. So every cut is tested: the tokens of the text
around it must be those of both of its sides alone. Where they are not, the next place is tried. A text without a safe
place stays whole. Between tokens of nearly equal score a unigram tokenizer decides by rounding, which depends on where
a text begins: there, tokens can differ from those of the whole text.
"""

import re
from collections.abc import Callable, Iterable, Iterator

_CONTEXT = 256  # characters on both sides of a cut that are tokenized to test it; the longest tokens have 64 to 128
_TRIES = 64  # places that are tried among the characters of a piece
# Short runs, because a tokenizer may divide a long run by its length.
_BLANKS = re.compile(r"(?<=\S)\s{1,8}(?=\S)")

Encode = Callable[[list[str]], list[list[int]]]


def pieces(blocks: Iterable[str], encode: Encode, size: int) -> Iterator[str]:
    """Yield the pieces of a text, which is given in blocks of any length.

    Args:
        blocks: the text.
        encode: texts → token ids of each.
        size: characters of a piece. It is longer if a safe place comes later.
    """
    text, searched = "", size
    for block in blocks:
        text += block
        while len(text) > searched + _CONTEXT:
            cut = _safe_cut(text, searched, min(len(text) - _CONTEXT, searched + size), encode)
            if cut is None:
                searched = min(len(text) - _CONTEXT, searched + size)
            else:
                yield text[: cut[0]]
                text, searched = text[cut[1] :], size
    if text:
        yield text


def _safe_cut(text: str, start: int, stop: int, encode: Encode) -> tuple[int, int] | None:
    """The first safe cut at a blank in [start, stop), as the end of the left side and the beginning of the right
    one."""
    for tries, blanks in enumerate(_BLANKS.finditer(text, start, stop)):
        if tries == _TRIES:
            return None
        first, end = blanks.span()
        cuts = [(first, first), (end, end)]
        # A single blank may also be one that the tokenizer adds to each side by itself.
        cuts.append((first, end) if end - first == 1 else (end - 1, end - 1))
        before, after = max(0, first - _CONTEXT), end + _CONTEXT
        sides = [side for left, right in cuts for side in (text[before:left], text[right:after])]
        whole, *encoded = encode([text[before:after], *sides])
        for cut, left, right in zip(cuts, encoded[::2], encoded[1::2], strict=True):
            if left + right == whole:
                return cut
    return None
