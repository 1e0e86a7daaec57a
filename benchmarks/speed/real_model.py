"""Speed of a model that people have, on a CPU: this project, `transformers`, and what the memory or the arithmetic allows.

    retro import SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.safetensors
    python -m benchmarks.speed.real_model smollm2.safetensors SmolLM2-135M-Instruct.Q4_1.gguf [--text FILE]
    python -m benchmarks.speed.real_model RETROFITTED.safetensors MODEL.gguf --pages FILE ...

Generation: processor time until the first token, and per token after it, for one text, without and with drafts. The prompts are a
page of this project's documentation, a file of its code, and random tokens whose continuation is sampled, in which nothing
matches. With `--text`, a novel or another text is one more prompt. With `--pages`, the prompts are the beginnings of files, and a
model from `retro add-retrieval` reads 4 neighbors of each chunk; `transformers` continues without. The floor is the time to read
all weights once. Scoring: windows with the loss of each token. The floor is the time of the products of matrices at the rate of a large one. Rounds alternate between the
cases, so ratios are reliable on a shared machine; one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.common import add_minutes, budget, markdown, placement, say, write
from pipelines.results import Table
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.device import Placement
from retro.inference.decoder import Decoder
from retro.inference.generation import Batch, GeneratedToken, generate
from retro.inference.language_model import LanguageModel
from retro.inference.packed_weights import pack
from retro.inference.rows import RetrieveNeighbors
from retro.inference.scoring import score_windows, to_score
from retro.inference.settings import GenerationSettings
from retro.model.presets import count_parameters
from retro.model.retro import Retro

_REPOSITORY = Path(__file__).parents[2]
_PROMPT_TOKENS = 512
_WINDOW = 1024
_K = 4


@dataclass
class Case:
    """A prompt, how it is continued, and what was measured.

    Attributes:
        name: for the table.
        prompt: int64 [t].
        temperature: 0 = greedy.
        seconds: per token after the first, by system, of each round.
        first: seconds until the first token, by system, of each round.
        accepted: tokens of drafts that were accepted, of all generated ones.
        equal: whether the tokens with drafts were those without.
    """

    name: str
    prompt: np.ndarray
    temperature: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)
    accepted: float = 0.0
    equal: bool = True


class Ours(NamedTuple):
    """Our model."""

    model: Retro
    place: Placement
    retrieve: RetrieveNeighbors | None
    encode: Callable[[str], Any]  # token ids


def open_ours(checkpoint: Path, *, retrieves: bool) -> Ours:
    """Open an imported model, or one with its datastore."""
    if retrieves:
        opened = LanguageModel.open(checkpoint)
        _, retrieve = opened.checked([], GenerationSettings(), _K)
        return Ours(opened.model, opened.placement, retrieve, opened.tokenizer.encode)
    place = placement()
    model = load_model(open_checkpoint(checkpoint), place.device)
    place.cast(model)
    pack(model, place)
    tokenizer = Tokenizer.from_file(str(checkpoint.with_suffix("") / "tokenizer.json"))
    return Ours(model, place, None, lambda text: tokenizer.encode(text).ids)


def cases(encode: Callable[[str], Any], vocab_size: int, text: Path | None, pages: Sequence[Path]) -> list[Case]:
    """Return the prompts: the pages, or the others."""
    files = {"documentation": _REPOSITORY / "docs/how-to/serve.md", "code": _REPOSITORY / "retro/inference/decoder.py"}
    if text is not None:
        files["text"] = text
    if pages:
        files = {page.stem: page for page in pages}

    def prompt(file: Path) -> np.ndarray:
        return np.array(encode(file.read_text()[:20_000])[:_PROMPT_TOKENS], np.int64)

    chosen = [
        Case(f"{name}, temperature {temperature:g}", prompt(file), temperature)
        for temperature in (0, 0.8)
        for name, file in files.items()
    ]
    if pages:
        return chosen
    random = np.random.default_rng(0).integers(0, vocab_size, _PROMPT_TOKENS)
    return [*chosen, Case("random tokens, temperature 1.5", random, 1.5)]


def ours(own: Ours, case: Case, num_tokens: int, *, drafts: bool) -> tuple[float, float, list[GeneratedToken]]:
    """Return the processor time until the first token, that per token after it, and the tokens."""
    settings = GenerationSettings(
        max_tokens=num_tokens, temperature=case.temperature, top_k=0, top_p=1.0, ignore_eos=True, drafts=drafts
    )
    batch = Batch(Decoder(own.model, own.place, 2048), lambda tokens: "", -1)
    began = time.process_time()
    steps = generate(batch, [case.prompt], settings, [own.retrieve])
    tokens = next(steps)
    first, started = len(tokens), time.process_time()
    for step in steps:
        tokens += step
    return started - began, (time.process_time() - started) / (len(tokens) - first), tokens


class _Clock:
    """A streamer of `transformers`: notes when the prompt was read."""

    started = 0.0
    calls = 0

    def put(self, _: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first is the prompt
            self.started = time.process_time()

    def end(self) -> None:
        pass


def theirs(model: Any, case: Case, num_tokens: int) -> tuple[float, float]:
    """Return the processor time of `generate` of `transformers` until the first token, and per token after it."""
    clock, began = _Clock(), time.process_time()
    sampling = (
        {"do_sample": True, "temperature": case.temperature, "top_k": 0} if case.temperature else {"do_sample": False}
    )
    model.generate(
        torch.from_numpy(case.prompt[None]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        streamer=clock,
        **sampling,
    )
    return clock.started - began, (time.process_time() - clock.started) / (num_tokens - 1)


def score_ours(model: Retro, place: Placement, tokens: np.ndarray) -> float:
    """Return the mean loss of the tokens, in nats."""
    (sequence,) = to_score(model, [tokens], context=_WINDOW)
    score_windows(model, sequence.windows, place)
    return -float(sequence.scores.log_probabilities.mean())


def score_theirs(model: Any, tokens: np.ndarray) -> float:
    """Return the loss of `transformers`."""
    ids = torch.from_numpy(tokens[None])
    return float(model(ids, labels=ids).loss)


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def bandwidth() -> float:
    """Return how many bytes of memory a sum reads per second."""
    numbers = torch.ones(100_000_000)
    return numbers.nbytes / min(processor_seconds(numbers.sum) for _ in range(5))


def product_rate(place: Placement) -> float:
    """Return the operations per second of a large product of matrices."""
    a, b = (torch.randn(2048, 2048).to(place.dtype) for _ in range(2))
    return 2 * 2048**3 / min(processor_seconds(partial(torch.mm, a, b)) for _ in range(5))


def main() -> None:
    """Print the tables and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--text", type=Path, help="one more prompt")
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="prompts for a model with a datastore")
    parser.add_argument("--tokens", type=int, default=128, help="to generate in each case")
    parser.add_argument("--rounds", type=int, default=3)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-real-model.json"))
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    own = open_ours(options.checkpoint, retrieves=bool(options.pages))
    place, parameters = own.place, count_parameters(own.model, embeddings=True)
    other = AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=place.dtype
    ).eval()
    chosen = cases(own.encode, own.model.settings.vocab_size, options.text, options.pages)
    scored = np.tile(chosen[0].prompt, _WINDOW)[:_WINDOW]
    floors, scoring = list[float](), dict[str, list[float]]()
    with torch.inference_mode():
        processor_seconds(partial(theirs, other, chosen[0], 4))
        for _ in limit.rounds(options.rounds):
            floors.append(parameters * place.dtype.itemsize / bandwidth())
            for name, score in (
                ("transformers", partial(score_theirs, other, scored)),
                ("ours", partial(score_ours, own.model, place, scored)),
                ("floor", lambda: None),
            ):
                took = (
                    2 * parameters * len(scored) / product_rate(place) if name == "floor" else processor_seconds(score)
                )
                scoring.setdefault(name, []).append(len(scored) / took)
            for case in chosen:
                measure(case, own, other, options.tokens)
    report(chosen, floors, scoring, options.output, parameters)


def measure(case: Case, own: Ours, other: Any, num_tokens: int) -> None:
    """Add a round of one case."""
    *plain, without = ours(own, case, num_tokens, drafts=False)
    *drafted, tokens = ours(own, case, num_tokens, drafts=True)
    for name, (first, seconds) in {
        "transformers": theirs(other, case, num_tokens),
        "ours": plain,
        "drafts": drafted,
    }.items():
        case.first.setdefault(name, []).append(first)
        case.seconds.setdefault(name, []).append(seconds)
    case.accepted = sum(token.accepted for token in tokens) / len(tokens)
    case.equal = [token.token for token in tokens] == [token.token for token in without]


def report(
    chosen: list[Case], floors: list[float], scoring: dict[str, list[float]], output: Path, parameters: int
) -> None:
    """Print the tables and write the figures."""

    def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[one], seconds[other], strict=True))

    floor, rows = statistics.median(floors), []
    for case in chosen:
        rate = {name: 1 / statistics.median(seconds) for name, seconds in case.seconds.items()}
        rows.append(
            [
                case.name,
                *(f"{rate[name]:.1f}" for name in ("transformers", "ours", "drafts")),
                f"{ratio(case.seconds, 'ours', 'transformers'):.2f}×",
                f"{ratio(case.seconds, 'drafts', 'ours'):.2f}×",
                f"{case.accepted:.0%}",
                "yes" if case.equal else "no",
                f"{floor * rate['ours']:.2f}",
                *(f"{statistics.median(case.first[name]):.2f}" for name in ("transformers", "ours")),
                f"{ratio(case.first, 'ours', 'transformers'):.2f}×",
            ]
        )
    prompts = ("s to the first token, theirs", "ours", "theirs / ours")
    header = ["prompt", "transformers", "ours", "with drafts", "ours / theirs", "drafts / ours"]
    print(markdown(Table([*header, "from drafts", "equal tokens", "of the floor", *prompts], rows)))
    say(f"floor: {1 / floor:.0f} tokens/s to read {parameters / 1e6:.1f}M weights")
    rates = {name: statistics.median(values) for name, values in scoring.items()}
    say(", ".join(f"scoring, {name}: {rate:,.0f} tokens/s" for name, rate in rates.items()))
    pairs = zip(scoring["ours"], scoring["transformers"], strict=True)
    say(f"scoring, ours / theirs: {statistics.median(a / b for a, b in pairs):.2f}×")
    results = {"floor_seconds": floors, "scoring_tokens_per_second": scoring}
    generation = {
        case.name: {
            "seconds_to_first_token": case.first,
            "seconds_per_token": case.seconds,
            "accepted": case.accepted,
            "equal": case.equal,
        }
        for case in chosen
    }
    write(output, results | {"generation": generation})


if __name__ == "__main__":
    main()
