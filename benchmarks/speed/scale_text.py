"""Text of any size, with the words, phrases and document lengths of real corpora and a share of near copies.

    python -m benchmarks.speed.scale_text DATA/msdocs_cpp DATA/zh_tidb_docs … --output FOLDER --gigabytes 12

Writes FOLDER/00000.jsonl.zst and so on, about 17 MB of text in each. A part depends on the corpora, --seed and its
number alone, so a stopped run continues, and a larger --gigabytes adds parts.

    corpora ─► words w1 w2 w3 … one sequence ─► trigram model: of all places where the last two words stand, one is drawn, and the
    word after it comes next

This is a trigram model without a table of probabilities. Lengths of documents are drawn from those of the corpora. A
share of --copies are copies of an earlier document of the part. In a copy every twentieth word is replaced by a random
one.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from benchmarks.common import add_minutes, budget, measured_on, say
from indexing.corpus.documents import CorpusSettings
from indexing.store.files import write_bytes
from pipelines.cli.planning.sample import draw_sample

_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\s*[^\W\u3040-\u30ff\u3400-\u9fff]+|\s*[^\w\s]|\s+")
_END = 0  # id of the end of a document
_LANES, _STEPS = 4096, 1024  # words of a part: independent chains, and words of each
_CHANGED = 0.05  # share of the words of a near copy that are replaced


@dataclass(frozen=True)
class Trigrams:
    """A trigram model of words.

    Attributes:
        words: text of each word, with the blanks before it; the first is the end of a document.
        sequence: [n] int32 words of the corpora, one document after another.
        bigrams: [n] int32 number of the pair of words that ends at each place.
        places: [n] int32 the places, grouped by their pair.
        starts: [pairs + 1] int64 where each pair's group starts in `places`.
        first: [documents] int64 place of the first word of each document.
        lengths: [documents] int64 words of each document.
    """

    words: list[str]
    sequence: np.ndarray
    bigrams: np.ndarray
    places: np.ndarray
    starts: np.ndarray
    first: np.ndarray
    lengths: np.ndarray

    @classmethod
    def fit(cls, texts: list[str]) -> "Trigrams":
        """Count the words of some documents."""
        numbers: dict[str, int] = {"\n\n": _END}
        ids: list[int] = [_END]
        for text in texts:
            ids += [numbers.setdefault(word, len(numbers)) for word in _WORDS.findall(text)]
            ids.append(_END)
        sequence = np.array(ids, dtype=np.int32)
        pairs = np.roll(sequence, 1).astype(np.int64) * len(numbers) + sequence
        _, bigrams, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        ends = np.flatnonzero(sequence == _END)
        return cls(
            words=list(numbers),
            sequence=sequence,
            bigrams=bigrams.astype(np.int32),
            places=np.argsort(bigrams, kind="stable").astype(np.int32),
            starts=np.append(0, np.cumsum(counts)),
            first=ends[:-1] + 1,
            lengths=np.diff(ends) - 1,
        )

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Words [_LANES, _STEPS] int32 of independent chains. After the end of a document, a chain continues with the
        start of another."""
        out = np.empty((_STEPS, _LANES), dtype=np.int32)
        at = self.first[rng.integers(len(self.first), size=_LANES)]
        for step in range(_STEPS):
            out[step] = self.sequence[at]
            pair = self.bigrams[at]
            begin = self.starts[pair]
            same = self.places[begin + (rng.random(_LANES) * (self.starts[pair + 1] - begin)).astype(np.int64)]
            ended = (self.sequence[at] == _END) | (same + 1 >= len(self.sequence))
            at = np.where(ended, self.first[rng.integers(len(self.first), size=_LANES)], same + 1)
        return out.T.copy()


def documents(model: Trigrams, copies: float, rng: np.random.Generator) -> list[np.ndarray]:
    """The documents of a part, each its words [n] int32. The last one may be cut."""
    drawn = model.draw(rng).ravel()
    found: list[np.ndarray] = []
    start = 0
    while start < len(drawn):
        if found and rng.random() < copies:
            copy = found[rng.integers(len(found))].copy()
            changed = np.flatnonzero(rng.random(len(copy)) < _CHANGED)
            copy[changed] = model.sequence[rng.integers(len(model.sequence), size=len(changed))]
            found.append(copy)
        else:
            stop = start + max(1, int(model.lengths[rng.integers(len(model.lengths))]))
            found.append(drawn[start:stop])
            start = stop
    return found


def part(model: Trigrams, number: int, copies: float, seed: int) -> bytes:
    """The JSON Lines of a part, compressed."""
    words = np.array(model.words, dtype=object)
    lines = []
    for row, document in enumerate(documents(model, copies, np.random.default_rng([seed, number]))):
        text = "".join(words[document].tolist()).strip()
        if text:
            lines.append(json.dumps({"id": f"{number:05d}-{row}", "text": text}, ensure_ascii=False) + "\n")
    return zstandard.ZstdCompressor(level=1).compress("".join(lines).encode())


def main() -> None:
    """Write the parts that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+")
    parser.add_argument("--output", type=Path, default=Path("scale/text"))
    parser.add_argument("--gigabytes", type=float, default=0.1, help="text to write, before compression")
    parser.add_argument("--sample-mb", type=float, default=60, help="text of the corpora that the model is made of")
    parser.add_argument("--copies", type=float, default=0.05, help="probability that a document is a near copy")
    parser.add_argument("--seed", type=int, default=0)
    add_minutes(parser)
    options = parser.parse_args()
    if not 0 <= options.copies < 1:
        parser.error(f"--copies {options.copies}: must be at least 0 and below 1.")
    limit = budget(options)
    sample = draw_sample(CorpusSettings(paths=tuple(options.corpora)), int(options.sample_mb * 1e6))
    model = Trigrams.fit([document.text for document in sample.documents])
    size = sum(document.size for document in sample.documents)
    per_part = size / len(model.sequence) * _LANES * _STEPS / (1 - options.copies)
    parts = range(max(1, round(options.gigabytes * 1e9 / per_part)))
    say(f"{len(model.sequence):,} words, {len(model.words):,} different ones, {len(model.starts) - 1:,} pairs")
    say(f"{len(parts)} parts of about {per_part / 1e6:.0f} MB")
    options.output.mkdir(parents=True, exist_ok=True)
    files = [options.output / f"{number:05d}.jsonl.zst" for number in parts]
    for number in limit.each([number for number in parts if not files[number].exists()], "part"):
        write_bytes(files[number], part(model, number, options.copies, options.seed))
    say(", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
