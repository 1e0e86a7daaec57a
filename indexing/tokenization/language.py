"""The language of a text, by its characters."""

import re
from collections.abc import Sequence
from typing import Literal

from indexing.tokenization.texts import as_texts

Language = Literal["en", "zh"]

_HAN = re.compile(r"[\u4e00-\u9fa5]")
_HAN_SHARE = 0.2  # a Chinese text has at least this share of Chinese characters; names and numbers use other scripts


def language_of(texts: Sequence[str]) -> Language:
    """Return Chinese if at least a fifth of the characters are Chinese, else English."""
    texts = as_texts(texts)
    characters = sum(map(len, texts))
    return "zh" if sum(len(_HAN.findall(text)) for text in texts) >= _HAN_SHARE * max(1, characters) else "en"
