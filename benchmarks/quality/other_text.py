"""Does retrieval harm text that is not of the datastore's kind, and answers that need no datastore?

    retro add-retrieval MODEL --datastore DATASTORE --output FILE.safetensors     for each datastore
    python -m benchmarks.quality.other_text FILE.safetensors ... --output FOLDER --texts FILE ... --questions FILE
    python -m benchmarks.quality.other_text summary --output FOLDER

Texts are scored OFF and ON, as `retro eval perplexity --texts` does: short ones and long ones. In addition, two kinds
of prompts are continued with the likeliest tokens, OFF and ON:

| prompts | |
|---|---|
| questions | drawn from FILE (JSON Lines with `question`): the datastore has nothing to say |
| beginnings | the first tokens of held-out documents of the datastore |

For both: how many continuations are equal OFF and ON, how many are equal or as likely under the model OFF within 1%,
and in how many a sequence of four tokens occurs three times. Results are stored after every datastore, so the benchmark
resumes.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Budget, budget, markdown, model_parser, say, write
from indexing.store.datastore import Datastore
from pipelines.cli.results import Table
from retro.evaluation.other_texts import evaluate_texts, text_files
from retro.evaluation.question_sets import read_questions
from retro.evaluation.settings import PerplexitySettings
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

K = 4
ANSWER = GenerationSettings(max_tokens=48, temperature=0)
WINDOWS = (512, 2048)
"""First tokens of a document that are scored: short and long texts."""
BEGINNING = 24
"""Tokens of a beginning."""
_TOGETHER = 8


def questions(file: Path, count: int) -> list[str]:
    """Different questions, drawn from a file."""
    texts = sorted({question.question for question in read_questions(file)})
    return [texts[number] for number in np.random.default_rng(0).permutation(len(texts))[:count]]


def beginnings(datastore: Datastore, count: int) -> list[np.ndarray]:
    """The first tokens of held-out documents, if there are some."""
    split, m = datastore.valid, datastore.chunk_length
    if not split.num_documents:
        return []
    chosen = np.random.default_rng(0).permutation(split.num_documents)[:count]
    chunks = split.chunk_ranges(np.sort(chosen))[:, :1] + np.arange(-(-BEGINNING // m))
    tokens = split.tokens.gather(chunks.ravel()).reshape(len(chosen), -1)[:, :BEGINNING]
    return [row.astype(np.int64) for row in tokens]


def continued(
    model: LanguageModel, prompts: Sequence[np.ndarray], k: int, settings: GenerationSettings = ANSWER
) -> list[list[int]]:
    """A continuation of each prompt; unless told otherwise the likeliest one."""
    answers = [list[int]() for _ in prompts]
    for first in range(0, len(prompts), _TOGETHER):
        for step in model.generate(prompts[first : first + _TOGETHER], settings, k):
            for token in step:
                answers[first + token.row].append(token.token)
    return answers


def repeats(tokens: Sequence[int]) -> bool:
    """Whether a sequence of four tokens occurs three times."""
    return max(Counter(zip(*(tokens[n:] for n in range(4)), strict=False)).values(), default=0) >= 3


def nats_off(model: LanguageModel, prompts: Sequence[np.ndarray], answers: Sequence[list[int]]) -> np.ndarray:
    """Mean loss of a token of each answer with retrieval OFF."""
    scores = model.score([np.append(*pair).astype(np.int64) for pair in zip(prompts, answers, strict=True)])
    return np.array([-part[-len(answer) :].mean() for part, answer in zip(scores, answers, strict=True)])


def compared(model: LanguageModel, prompts: Sequence[np.ndarray]) -> dict[str, float]:
    """Continue prompts OFF and ON."""
    off, on = (continued(model, prompts, k) for k in (0, K))
    equal = np.array([one == other for one, other in zip(off, on, strict=True)])
    likely = nats_off(model, prompts, on) <= 1.01 * nats_off(model, prompts, off)
    return {
        "prompts": len(prompts),
        "equal": float(equal.mean()),
        "equal_or_likely": float((equal | likely).mean()),
        "repeats_off": float(np.mean(list(map(repeats, off)))),
        "repeats_on": float(np.mean(list(map(repeats, on)))),
    }


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Add the options for `scored_texts`."""
    parser.add_argument("--texts", nargs="+", default=[], help="files of text of other kinds than the datastores")
    parser.add_argument("--text-tokens", type=int, default=4000, help="tokens of each of these files and windows")


def scored_texts(model: LanguageModel, k: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Score texts of other kinds, OFF and ON: rows of `evaluate_texts`, which name their `window`."""
    rows = list[dict[str, Any]]()
    for window in WINDOWS:
        settings = PerplexitySettings(texts=tuple(options.texts), k=(k,), max_tokens=options.text_tokens, window=window)
        rows += [{"window": window} | row for row in evaluate_texts(model, text_files(settings), settings)]
    return rows


def texts_table(found: dict[str, dict[str, Any]]) -> Table:
    """The rows `texts` of all datastores."""
    body = []
    for name, one in found.items():
        for row in one.get("texts", ()):
            change, worst, off = row["changes"][0], row["worst"], row["results"][0]
            interval = "{:+.2f}% ({:+.2f} to {:+.2f})".format(*(change[key] for key in ("percent", "low", "high")))
            least = f"{worst['percent']:+.2f}%, {worst['bits']:+.1f} bits"
            of_set = [row["set"], f"{row['window']:,}", f"{off['documents']}", f"{off['tokens']:,}"]
            body.append([name, *of_set, interval, least])
    columns = ["datastore", "text", "window", "documents", "tokens", "ON against OFF", "worst document"]
    return Table(columns, body)


def run(file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model with its datastore."""
    model = LanguageModel.open(file, device="cpu")
    assert model.retriever is not None
    texts = scored_texts(model, K, options)
    asked = [model.tokenizer.encode(text) for text in questions(options.questions, options.prompts)]
    prompts = {
        "questions": [np.append(model.tokenizer.bos_id, tokens).astype(np.int64) for tokens in asked],
        "beginnings": beginnings(model.retriever.datastore, options.prompts),
    }
    answers = {}
    for kind, tokens in prompts.items():
        if not tokens:
            continue
        answers[kind] = compared(model, tokens)
        say(f"{file.stem}: {kind}: {answers[kind]}")
    return {"texts": texts, "answers": answers}


def summary(folder: Path) -> None:
    """Print the tables as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    say(markdown(texts_table(found)) + "\n")
    body = [
        [name, kind, f"{one['prompts']}"]
        + [f"{one[key]:.0%}" for key in ("equal", "equal_or_likely", "repeats_off", "repeats_on")]
        for name, of_model in found.items()
        for kind, one in of_model["answers"].items()
    ]
    columns = ["datastore", "prompts", "number", "equal", "equal or as likely", "repeat, OFF", "repeat, ON"]
    say(markdown(Table(columns, body)))
    say(json.dumps({name: {key: one[key] for key in ("machine", "commit")} for name, one in found.items()}))


def main() -> None:
    """Measure some models, or print the tables."""
    parser = model_parser(__doc__)
    parser.add_argument("models", nargs="*", help="more models")
    add_texts(parser)
    parser.add_argument("--questions", type=Path, help="JSON Lines with `question`")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each kind")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limit: Budget = budget(options)
    files = [] if options.base == "summary" else [Path(name) for name in (options.base, *options.models)]
    for file in limit.each(files, "model"):
        stored = options.output / f"{file.stem}.json"
        if not stored.exists():
            write(stored, run(file, options))
    summary(options.output)


if __name__ == "__main__":
    main()
