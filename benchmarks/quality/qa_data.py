"""Training and test data of `finetuning.py`: files of passages, questions and pretraining text, divided by article.

    passages of a set ─► cut to the length of a neighbor ─► passages.jsonl                     for the test
                      └► of training articles ─┬───────► reading.jsonl                         for training
    passages of another set ───────────────────┘  └────► cloze questions ─► practice.jsonl     and its questions
    questions of a set ─► train.jsonl, test.jsonl (a fifth of the articles)
    corpora, passages of training articles and of the other set ─► pretraining.jsonl

Training never uses the text of a test article, or a passage of the other set whose title also occurs in the set.
Passages are cut at the ends of sentences to about 60 words or 130 Chinese characters (the paper's have 100 words), so
that a passage with its title fits into a neighbor. The positive passages of a question are those that contain its
answer; passages that share more words with the question come first.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.quality.cloze import cloze_questions
from indexing.corpus.json_lines import read_json_lines
from indexing.sparse.terms import terms
from indexing.store.files import write_bytes, write_json
from retro.question_answering.answer_metrics import Language

TEST_SHARE = 0.2
_LONGEST = {"en": 60, "zh": 130}  # words, characters
_UNITS = {"en": r"\S+\s*", "zh": r"."}
_SPACED = "qed_nq"  # its punctuation is separated by spaces
_SENTENCES = {"en": r"(?<=[.!?])\s+", "zh": r"(?<=[。！？；])"}

Row = dict[str, Any]


@dataclass(frozen=True)
class QuestionSet:
    """A set, and the data that is used in addition to it.

    Attributes:
        language: language of all texts.
        practice: passages and questions of another set, for training.
        corpora: additional text for pretraining.
    """

    language: Language
    practice: tuple[str, str]
    corpora: tuple[str, ...]


SETS = {
    "squad_v11_dev": QuestionSet("en", ("qed_nq/passages_train", "qed_nq/questions_train"), ("msdocs_cpp/docs",)),
    "cmrc2018": QuestionSet("zh", ("drcd/passages", "drcd/questions"), ("zh_laws/laws", "zh_tidb_docs/docs")),
}


def is_test(title: str) -> bool:
    """Return whether an article belongs to the test and not to training, by a hash of its title."""
    digest = hashlib.sha256(title.encode()).digest()
    return int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64


def prepare(data: Path, name: str, out: Path, clozes: int, corpus_bytes: int) -> Row:
    """Write the files of a set and their counts unless they exist; return the counts.

    Args:
        data: folder with a folder for each set.
        name: name of the set.
        out: folder for the files.
        clozes: largest number of cloze questions per passage.
        corpus_bytes: largest number of bytes of the corpora in the pretraining text.
    """
    if (counts := out / "counts.json").exists():
        return dict(json.loads(counts.read_text()))
    chosen = SETS[name]
    passages, questions = (_rows(data, f"{name}/{kind}") for kind in ("passages", "questions"))
    titles = {row["id"]: row["title"] for row in passages}
    others, other_questions = (_rows(data, kind) for kind in chosen.practice)
    others = [row for row in others if row["title"] not in set(titles.values())]
    kept = {row["id"] for row in others}
    other_questions = [row for row in other_questions if kept.issuperset(row["positive_ids"])]
    learned = [row for row in passages if not is_test(row["title"])]
    pieces = _cut(passages, chosen.language)
    reading = [*_cut(learned, chosen.language), *_cut(others, chosen.language)]
    train, test = (
        [row for row in questions if is_test(titles[row["positive_ids"][0]]) == side] for side in (False, True)
    )
    practice = list(_with_places(other_questions, reading, answered=True))
    practised = list(cloze_questions(reading, chosen.language, clozes, seed=0))
    files = {
        "passages": pieces,
        "reading": reading,
        "train": list(_with_places(train, reading, answered=True)),
        "test": list(_with_places(test, pieces, answered=False)),
        "practice": sorted(practice + practised, key=_drawn),
        "pretraining": [*learned, *others, *_corpora(data, chosen.corpora, corpus_bytes)],
    }
    out.mkdir(parents=True, exist_ok=True)
    for file, rows in files.items():
        write_bytes(out / f"{file}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    found: Row = {
        "articles": len(set(titles.values())),
        "test articles": sum(map(is_test, set(titles.values()))),
        "passages": len(passages),
        "pieces": len(pieces),
        "train questions": len(files["train"]),
        "train questions dropped": len(train) - len(files["train"]),
        "test questions": len(test),
        "practice questions of another set": len(practice),
        "cloze questions": len(practised),
        "pretraining bytes": sum(len(row["text"].encode()) for row in files["pretraining"]),
    }
    write_json(counts, found)
    return found


def _rows(data: Path, name: str) -> list[Row]:
    rows = [row for _, row in read_json_lines(data / f"{name}.jsonl.zst", f"the data of {name}")]
    return [_joined(row) for row in rows] if name.startswith(_SPACED) else rows


def _joined(value: Any) -> Any:
    """Remove the spaces that a tokenizer has put around punctuation."""
    if isinstance(value, str):
        value = re.sub(r"`` ?| ?''", '"', value)
        value = re.sub(r" ([,.;:!?%)\]’]|'s\b|n't\b)", r"\1", value)
        return re.sub(r"([(\[$£]) ", r"\1", value)
    if isinstance(value, dict):
        return {key: each if "id" in key else _joined(each) for key, each in value.items()}
    return [_joined(each) for each in value] if isinstance(value, list) else value


def _cut(passages: Iterable[Row], language: Language) -> list[Row]:
    """Cut passages into pieces of whole sentences, with ids `ID/n`. Sentences that are too long are cut too."""
    return [
        {"id": f"{row['id']}/{number}", "title": row["title"], "text": text}
        for row in passages
        for number, text in enumerate(_pieces(row["text"], language))
    ]


def _pieces(text: str, language: Language) -> Iterator[str]:
    longest, joint = _LONGEST[language], " " if language == "en" else ""
    held: list[str] = []
    size = 0
    for sentence in re.split(_SENTENCES[language], text):
        units = iter(re.findall(_UNITS[language], sentence, flags=re.DOTALL))
        while part := list(islice(units, longest)):
            if held and size + len(part) > longest:
                yield joint.join(held)
                held, size = [], 0
            held.append("".join(part).strip())
            size += len(part)
    if held:
        yield joint.join(held)


def _with_places(questions: Iterable[Row], pieces: Sequence[Row], *, answered: bool) -> Iterator[Row]:
    """Yield questions whose `positive_ids` are the pieces that contain their first answer.

    If no piece contains an answer (it spans two pieces, or is not verbatim), all pieces of the passage are positive;
    with `answered`, the question is dropped.
    """
    of_passage: dict[str, list[Row]] = {}
    for piece in pieces:
        of_passage.setdefault(piece["id"].rpartition("/")[0], []).append(piece)
    for row in questions:
        passage = [piece for each in row["positive_ids"] for piece in of_passage[each]]
        verbatim = [each for each in row["answers"] if any(each in piece["text"] for piece in passage)]
        if answered and not verbatim:
            continue
        holding = [piece for piece in passage if not verbatim or verbatim[0] in piece["text"]]
        question_terms = set(terms(row["question"]))
        holding.sort(key=lambda piece: -len(question_terms.intersection(terms(piece["text"]))))
        others = [each for each in row["answers"] if each not in verbatim[:1]]
        yield row | {"answers": verbatim[:1] + others, "positive_ids": [piece["id"] for piece in holding]}


def _corpora(data: Path, names: Sequence[str], num_bytes: int) -> Iterator[Row]:
    """Yield documents of each corpus in the order of a hash, up to an equal part of the bytes."""
    for name in names:
        left = num_bytes // len(names)
        for row in sorted(_rows(data, name), key=_drawn):
            if (size := len(row["text"].encode())) <= left:
                left -= size
                yield row


def _drawn(row: Row) -> bytes:
    return hashlib.sha256(row["id"].encode()).digest()
