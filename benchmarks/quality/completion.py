"""Completion of functions, without and with retrieval: the next line and 64 tokens, of files that the datastore does
not have (*new*) and of files that it has (*known*).

    python -m benchmarks.quality.completion TREE --model MODEL --output FILE [--folders FILE] [--functions 96]

TREE is the folder that the model's datastore was built from, without the folders of FILE, a name on each line. There are
half as many known functions as new ones. A prompt has up to 400 tokens: a C file up to the third line of a function's
body. The likeliest tokens are generated, or with `--temperature` sampled ones. Measures:

- next line: whether it is right,
- similarity of 64 tokens with those of the file: 1 - Levenshtein distance / longer length in characters,
- names of the file: share of the generated identifiers of four and more letters that occur in the file,
- distinct 4-grams: different 4-grams of generated tokens / their number.

Changes are of ON against OFF, with 95% intervals of a paired bootstrap over functions. The same command resumes.
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Budget, add_minutes, budget, check_same_options, markdown, measured_on
from indexing.store.files import read_json, write_json
from pipelines.cli.results import Table
from retro.evaluation.answer_metrics import mean_with_interval
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

TOKENS, CONTEXT, BATCH = 64, 400, 8
KNOWN_FOLDERS = 48
"""Folders that known functions are of, at random."""
_FUNCTION = re.compile(r"\)\n\{\n((?:\t.*\n|\n)+)\}\n")
_NAME = re.compile(r"[A-Za-z_]\w{3,}")


@dataclass(frozen=True)
class Function:
    """A function to complete.

    Attributes:
        file: below the tree.
        before: text of the file up to the cut.
        after: text from the cut on.
    """

    file: str
    before: str
    after: str


def functions_of(tree: Path, folders: Sequence[str], count: int) -> list[Function]:
    """Draw functions of ten lines or more, about equally many from each folder."""
    of_folder = [list(_in_folder(tree, folder)) for folder in folders]
    found: list[Function] = []
    while any(of_folder) and len(found) < count:
        found += [rest.pop(0) for rest in of_folder if rest]
    return found[:count]


def other_folders(tree: Path, held_out: Sequence[str]) -> list[str]:
    """Some folders with C files that are not held out."""
    folders = sorted({str(file.parent.relative_to(tree)) for file in tree.rglob("*.c")})
    known = [name for name in folders if not any(f"{name}/".startswith(f"{one}/") for one in held_out)]
    random.Random(0).shuffle(known)
    return known[:KNOWN_FOLDERS]


def _in_folder(tree: Path, folder: str) -> Iterator[Function]:
    """A function of each file of a folder, in random order."""
    files = sorted((tree / folder).rglob("*.c"))
    random.Random(folder).shuffle(files)
    for file in files:
        text = file.read_text("utf-8", "replace")
        bodies = [each for each in _FUNCTION.finditer(text) if each[1].count("\n") >= 10 and each.start() > 1500]
        if bodies:
            body = random.Random(file.name).choice(bodies)
            cut = body.start(1) + len("".join(body[1].splitlines(keepends=True)[:3]))
            while text[cut] == "\n":
                cut += 1
            yield Function(str(file.relative_to(tree)), text[:cut], text[cut:])


def prompt_of(model: LanguageModel, function: Function) -> np.ndarray:
    """The last tokens before the cut, after a beginning of a document."""
    return np.asarray([model.tokenizer.bos_id, *model.tokenizer.encode(function.before)[-CONTEXT:]])


def complete(
    model: LanguageModel, functions: Sequence[Function], k: int, temperature: float, done: int, limit: Budget
) -> Iterator[list[dict[str, float | str]]]:
    """Complete functions after the first `done` ones; yield the measurements of a batch."""
    settings = GenerationSettings(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)
    for first in limit.each(range(done, len(functions), BATCH), "batch"):
        some = functions[first : first + BATCH]
        prompts = [prompt_of(model, each) for each in some]
        tokens: list[list[int]] = [[] for _ in some]
        for step in model.generate(prompts, settings, k):
            for token in step:
                tokens[token.row].append(token.token)
        yield [measured(model, each, ids) for each, ids in zip(some, tokens, strict=True)]


def measured(model: LanguageModel, function: Function, ids: Sequence[int]) -> dict[str, float | str]:
    """Compare a continuation with the file."""
    text = model.tokenizer.decode(ids)
    wanted = model.tokenizer.decode(model.tokenizer.encode(function.after[: 8 * TOKENS])[:TOKENS])
    names = _NAME.findall(text)
    known = set(_NAME.findall(function.before + function.after))
    return {
        "file": function.file,
        "text": text,
        "wanted": wanted,
        "next line": float(first_line(text) == first_line(wanted)),
        "similarity": similarity(text, wanted),
        "names of the file": sum(name in known for name in names) / max(1, len(names)),
        "distinct 4-grams": distinct_grams(ids),
    }


def distinct_grams(ids: Sequence[int]) -> float:
    """Different 4-grams of tokens / their number."""
    grams = [tuple(ids[at : at + 4]) for at in range(len(ids) - 3)]
    return len(set(grams)) / max(1, len(grams))


MEASURES = ("next line", "similarity", "names of the file", "distinct 4-grams")


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def similarity(one: str, other: str) -> float:
    """1 - Levenshtein distance / length of the longer text."""
    row = np.arange(len(other) + 1)
    places, letters = np.arange(len(other) + 1), np.array([*other])
    for number, letter in enumerate(one, 1):
        new = np.minimum(row[1:] + 1, row[:-1] + (letters != letter))
        new = np.concatenate(([number], new))
        row = np.minimum.accumulate(new - places) + places  # insertions
    return float(1 - row[-1] / max(1, len(one), len(other)))


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folders", type=Path, default=Path(__file__).with_name("linux_folders.txt"))
    parser.add_argument("--functions", type=int, default=96)
    parser.add_argument("--k", type=int, default=2, help="neighbors of each chunk that ON reads")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 = the likeliest tokens")
    parser.add_argument("--output", type=Path, default=Path("benchmark-completion.json"))
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    held_out = options.folders.read_text().splitlines()
    functions = {
        "new": functions_of(options.tree, held_out, options.functions),
        "known": functions_of(options.tree, other_folders(options.tree, held_out), options.functions // 2),
    }
    model = LanguageModel.open(options.model)
    described = {
        "tree": str(options.tree),
        "model": model.checkpoint.fingerprint,
        "functions": options.functions,
        "k": options.k,
        "temperature": options.temperature,
    }
    results: dict[str, list[dict[str, float | str]]] = {}
    if options.output.exists():
        check_same_options(options.output, stored := read_json(options.output), described)
        results = stored["cases"]
    for kind, of_kind in functions.items():
        for case, k in (("OFF", 0), ("ON", options.k)):
            rows = results.setdefault(f"{kind}, {case}", [])
            for batch in complete(model, of_kind, k, options.temperature, len(rows), limit):
                rows += batch
                write_json(options.output, {**measured_on(), **described, "cases": results})
    print(markdown(table(results)))


def table(results: dict[str, list[dict[str, float | str]]]) -> Table:
    """Means of each case, and changes of ON."""
    rows = []
    for case, of_case in results.items():
        if not of_case:
            continue
        cells = [f"{np.mean([float(row[name]) for row in of_case]):.3f}" for name in MEASURES]
        rows.append([f"{case}, {len(of_case)} functions", *cells])
        if case.endswith("ON"):
            off = results[case.replace("ON", "OFF")]
            rows.append(["change", *(change(off, of_case, name) for name in MEASURES)])
    return Table(["", *MEASURES], rows)


def change(off: list[dict[str, float | str]], on: list[dict[str, float | str]], name: str) -> str:
    """Mean difference with its interval."""
    pairs = zip(on, off, strict=False)  # a run with --minutes can stop in a case
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(
        *mean_with_interval(np.array([float(one[name]) - float(other[name]) for one, other in pairs]))
    )


if __name__ == "__main__":
    main()
