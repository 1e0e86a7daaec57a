"""How many tokens a step generates with drafts, for functions of Linux that the datastore does not have (*new*) or has
(*known*), continued by the likeliest tokens with retrieval ON.

    python -m benchmarks.speed.drafts TREE --model MODEL --output FILE [--functions 96]

TREE and the functions are those of `benchmarks.quality.completion`. A text is generated alone, without drafts and with
them; the texts must be equal. *Own repetition* replays it with drafts that only the text itself proposes, as in prompt
lookup decoding. The work is the number of tokens by the passes that they took, with the measured costs of drafts
(`retro/inference/draft_costs.py`). Times are processor times, and the search for drafts is part of them.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, markdown, write
from benchmarks.quality.completion import TOKENS, Function, functions_of, other_folders, prompt_of
from pipelines.cli.results import Table
from retro.inference.draft_costs import draft_costs
from retro.inference.drafts import Account, propose
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.model.retro import Retro

K = 2  # as in `benchmarks.quality.completion`


class Way(NamedTuple):
    """One way to generate texts.

    Attributes:
        tokens: after the first step of each text.
        steps: passes.
        work: passes, with drafts as long as they take.
        seconds: processor time; 0 if it was replayed.
        worst: of a text, the least tokens by its work.
    """

    tokens: int
    steps: int
    work: float
    seconds: float
    worst: float


def generated(
    model: LanguageModel, prompt: np.ndarray, drafts: bool, costs: np.ndarray
) -> tuple[list[int], list[float], float]:
    """Tokens, the work of each step after the first one, and their seconds."""
    settings = GenerationSettings(max_tokens=TOKENS, temperature=0, ignore_eos=True, drafts=drafts)
    steps = model.generate([prompt], settings, K)
    tokens, work = [token.token for token in next(steps)], list[float]()
    started = time.process_time()
    for step in steps:
        if step:
            tokens += [token.token for token in step]
            work.append(1 + costs[sum(token.accepted + token.rejected for token in step)])
    return tokens, work, time.process_time() - started


def replayed(prompt: np.ndarray, tokens: Sequence[int], costs: np.ndarray) -> list[float]:
    """The work of each step after the first one if the text alone proposes drafts."""
    text, account, work = np.append(prompt, tokens), Account(), list[float]()
    at = len(prompt) + 1
    while at < len(text):
        proposal = propose(text[:at], account.rates, most=min(len(costs), len(text) - at) - 1)
        count = account.worth_reading(proposal, costs)
        wrong = np.flatnonzero(proposal.tokens[:count] != text[at : at + count])
        right = int(wrong[0]) if len(wrong) else count
        account.update(proposal, text[at : at + right + 1].tolist(), float(costs[count]))
        work.append(1 + costs[count])
        at += right + 1
    return work


def measure(model: LanguageModel, functions: Sequence[Function], limit: Budget) -> dict[str, Way]:
    """Generate the functions in all ways, in turn."""
    assert isinstance(model.model, Retro)
    costs = draft_costs(model.model)
    steps: dict[str, list[list[float]]] = {"without": [], "own repetition": [], "all sources": []}
    seconds, counts = dict.fromkeys(steps, 0.0), list[int]()
    for each in limit.each(functions, "function"):
        prompt = prompt_of(model, each)
        plain, work, of_plain = generated(model, prompt, False, costs)
        drafted, of_all, of_drafted = generated(model, prompt, True, costs)
        assert plain == drafted, f"{each.file}: drafts changed the text"
        counts.append(len(plain) - 1)
        seconds["without"] += of_plain
        seconds["all sources"] += of_drafted
        for way, found in zip(steps.values(), (work, replayed(prompt, plain, costs), of_all), strict=True):
            way.append(found)
    return {
        name: Way(
            sum(counts),
            sum(map(len, works)),
            sum(map(sum, works)),
            seconds[name],
            min(count / sum(work) for count, work in zip(counts, works, strict=True)),
        )
        for name, works in steps.items()
    }


def table(found: dict[str, dict[str, Way]]) -> Table:
    """A line for each way, and the ratio of all sources to the text's own repetition."""
    rows = []
    for kind, ways in found.items():
        for name, way in ways.items():
            rates = [f"{way.tokens / way.steps:.2f}", f"{way.tokens / way.work:.2f}"]
            of_time = f"{way.tokens / way.seconds:.1f}" if way.seconds else "–"
            rows.append([f"{kind}, {name}", *rates, of_time, f"{way.worst:.2f}"])
        own, every, plain = ways["own repetition"], ways["all sources"], ways["without"]
        cells = [f"{own.steps / every.steps:.2f} ×", f"{own.work / every.work:.2f} ×"]
        rows.append([f"{kind}, all / own", *cells, "", ""])
        rows.append([f"{kind}, all / without", "", "", f"{plain.seconds / every.seconds:.2f} ×", ""])
    return Table(["", "tokens a step", "by work", "tokens/s", "worst text, by work"], rows)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folders", type=Path, default=Path(__file__).parents[1] / "quality/linux_folders.txt")
    parser.add_argument("--functions", type=int, default=96)
    parser.add_argument("--output", type=Path, default=Path("benchmark-drafts.json"))
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    held_out = options.folders.read_text().splitlines()
    model = LanguageModel.open(options.model, device="cpu")
    of_kind = {
        "new": functions_of(options.tree, held_out, options.functions),
        "known": functions_of(options.tree, other_folders(options.tree, held_out), options.functions // 3),
    }
    found = {kind: measure(model, functions, limit) for kind, functions in of_kind.items()}
    print(markdown(table(found)))
    write(options.output, {kind: {name: way._asdict() for name, way in ways.items()} for kind, ways in found.items()})


if __name__ == "__main__":
    main()
