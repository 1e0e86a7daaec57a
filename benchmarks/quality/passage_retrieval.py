"""Search quality: does a search find the passage that answers a question? hit@1, hit@5 and MRR by embedder and
retrieval.

    python -m benchmarks.quality.passage_retrieval DATA [--sets cmrc2018 …] [--embedders lexical-1024 …]

DATA contains a folder for each set with passages (`id`, `text`, `title`) and questions (`question`, `positive_ids`) as
JSON Lines. The datastores are built in `--work` and reused. They have default settings except for the embedder, no
held-out passages, and an exact index, so that errors of an inverted index do not affect the ranking. The baseline is
BM25 over whole passages, once with words and pairs of characters as terms, once with the terms and titles of this
project; `--no-baselines` leaves it out. The defaults take minutes; docs/results/question-answering.md has the options
of its results.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Budget, add_minutes, budget, say, write
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.documents import CorpusSettings, Document
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import list_files
from indexing.embedding.settings import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.retrieval.retriever import Retriever
from indexing.sparse.terms import terms
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages.table import build
from pipelines.terminal.logger import setup_logging
from pipelines.terminal.progress import progress
from retro.evaluation.question_sets import Question, read_questions
from retro.evaluation.retrieval_metrics import RetrievalSettings, measure, right_documents

SETS = {
    "squad_v11_dev": ("passages", "questions"),
    "qed_nq": ("passages_train", "questions_train"),
    "cmrc2018": ("passages", "questions"),
    "drcd": ("passages", "questions"),
}
K1, B = 0.9, 0.4  # of the baseline
CHOSEN_ON = (3, 4)  # last digits of the numbers of the questions that terms and weights were chosen on
HELD_OUT = {"xquad_en": ("passages_en", "questions_en"), "xquad_zh": ("passages_zh", "questions_zh")}
FOLDERS = {"xquad_en": "xquad_en_zh", "xquad_zh": "xquad_en_zh"}
EMBEDDERS = {
    "lexical": EmbedderSettings(),
    "lexical-1024": EmbedderSettings(dimension=1024),
    "minilm": EmbedderSettings(kind="transformer", path="minilm"),
}


def open_passages(work: Path, passages: Path, embedder: EmbedderSettings) -> Retriever:
    """Build a datastore of the passages with the stages that search needs, and open it."""
    config = Config(
        datastore=work,
        corpus=CorpusSettings(paths=(str(passages),), split=(1, 0, 0)),
        chunks=ChunkSettings(chunk_length=64),
        embedder=embedder,
        index=IndexSettings(factory="Flat"),
    )
    for stage in ("chunk", "embed", "train-index", "add", "sparse"):
        build(config, make_executor(config.executor), only=stage)
    return Retriever.open(work)


def whole_passages(
    passages: Path, questions: list[Question], cut: Callable[[str], list[str]], *, titles: bool
) -> float:
    """Return hit@1 of the baseline, BM25 over whole passages."""
    settings = CorpusSettings(paths=(str(passages),))
    documents: list[Document] = []
    for file in list_files(settings):
        documents += read_documents(file, settings, on_problem=lambda problem: None)
    counts = [Counter(cut((each.metadata.get("title", "") + "\n") * titles + each.text)) for each in documents]
    lengths = np.array([each.total() for each in counts])
    norms = K1 * (1 - B + B * lengths / lengths.mean())
    postings: dict[str, list[tuple[int, int]]] = {}
    for number, each in enumerate(counts):
        for term, count in each.items():
            postings.setdefault(term, []).append((number, count))
    arrays = {term: np.array(each).T for term, each in postings.items()}
    hits = 0
    for question in questions:
        scores = np.zeros(len(documents))
        for term, repeated in Counter(cut(question.question)).items():
            if term in arrays:
                rows, found = arrays[term]
                weight = np.log1p((len(documents) - len(rows) + 0.5) / (len(rows) + 0.5))
                scores[rows] += repeated * weight * found * (K1 + 1) / (found + norms[rows])
        hits += documents[int(scores.argmax())].id in question.positive_ids
    return hits / len(questions)


def words_and_pairs(text: str) -> list[str]:
    """Return the usual terms of a text: words in lower case, pairs of Chinese characters."""
    found = []
    for run in re.findall(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+", text.lower()):
        is_chinese = "\u3400" <= run[0] <= "\u9fff" and len(run) > 1
        found += [run[place : place + 2] for place in range(len(run) - 1)] if is_chinese else [run]
    return found


def read_set(data: Path, name: str, every: int) -> tuple[Path, list[Question]]:
    """Return the file of passages, and every n-th question of a set that nothing was chosen on."""
    passages, questions = (data / FOLDERS.get(name, name) / f"{file}.jsonl.zst" for file in (SETS | HELD_OUT)[name])
    unseen = [each for number, each in enumerate(read_questions(questions)) if number % 10 not in CHOSEN_ON]
    return passages, unseen[::every]


def measure_set(options: argparse.Namespace, name: str, limit: Budget) -> list[dict[str, Any]]:
    """Return the rows of one set: the baselines, and every embedder with every way of retrieval."""
    passages, questions = read_set(options.data, name, options.every)
    say(f"{name}: {len(questions):,} questions, BM25 of whole passages", file=sys.stderr)
    rows: list[dict[str, Any]] = [
        {"set": name, "baseline": label, "hit": {1: whole_passages(passages, questions, cut, titles=titles)}}
        for label, cut, titles in (
            ("BM25 of whole passages", words_and_pairs, False),
            ("BM25 with our terms and titles", terms, True),
        )
        if options.baselines
    ]
    settings = RetrievalSettings()
    for embedder in limit.each(options.embedders, "embedder"):
        retriever = open_passages(options.work / f"{name}-{embedder}", passages, EMBEDDERS[embedder])
        right = right_documents(retriever.retrieval, questions)
        for way in limit.each(settings.retrieval, "retrieval"):
            with progress(f"{name}: {embedder}, {way}", total=len(questions), unit="questions") as advance:
                result = measure(retriever, questions, right, way, settings, advance)
            rows.append(
                {"set": name, "embedder": embedder, "datastore": retriever.datastore.fingerprint} | asdict(result)
            )
    return rows


def table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Return hit@1 as a Markdown table with a row for each kind of search and a column for each set."""
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        label = row.get("baseline") or f"{row['embedder']}, {row['retrieval']}"
        lines.setdefault(label, {})[row["set"]] = row["hit"][1]
    header = ["| hit@1 | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return header + [
        f"| {label} | " + " | ".join(f"{of_set[name]:.3f}" if name in of_set else "" for name in names) + " |"
        for label, of_set in lines.items()
    ]


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", nargs="+", default=["cmrc2018"], choices=[*SETS, *HELD_OUT])
    parser.add_argument("--embedders", nargs="+", default=["lexical"], choices=list(EMBEDDERS))
    parser.add_argument("--every", type=int, default=1, help="ask every n-th question")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false")
    parser.add_argument("--work", type=Path, default=Path("benchmark-questions"))
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-questions.json"))
    options = parser.parse_args()
    limit = budget(options)
    rows: list[dict[str, Any]] = []
    setup_logging()
    for number, name in enumerate(limit.each(options.sets, "set")):
        say(name, file=sys.stderr)
        rows += measure_set(options, name, limit.share(len(options.sets) - number))
        print("\n".join(table(rows, options.sets)), flush=True)
        write(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
