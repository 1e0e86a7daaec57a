"""A corpus of random words in which some held-out documents copy a long passage of a training document."""

import json
from pathlib import Path

import numpy as np

from indexing.corpus.scan import split_of

SPLIT = (900, 100, 0)
NUM_TRAINED, NUM_HELD_OUT, WORDS = 60, 6, 80


def write_planted(path: Path, copied: int = 40) -> Path:
    """Write training documents, and held-out ones: `fresh-N`, and `planted-N`, which have `copied` words of a training document."""
    random = np.random.default_rng(0)

    def words(count: int) -> list[str]:
        return ["".join(random.choice(list("abcdefghijklmnop"), 5)) for _ in range(count)]

    def in_split(name: str, passage: list[str]) -> str:
        around = WORDS - len(passage)
        while True:
            text = " ".join([*words(around // 2), *passage, *words(around - around // 2)])
            if split_of(text, SPLIT) == name:
                return text

    documents = {f"trained-{number}": in_split("train", []) for number in range(NUM_TRAINED)}
    for number in range(NUM_HELD_OUT):
        documents[f"fresh-{number}"] = in_split("valid", [])
        source = documents[f"trained-{7 * number}"].split()
        documents[f"planted-{number}"] = in_split("valid", source[20 : 20 + copied])
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in documents.items()))
    return path
