"""Speed of generation with a real model on one thread of a CPU: this project and `transformers`, in turn, and the limit
of the memory.

    retro import SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.safetensors
    python -m benchmarks.speed.real_model smollm2.safetensors SmolLM2-135M-Instruct.Q4_1.gguf --texts NOVEL ...

Prompts are the beginnings of texts, continued greedily and at a temperature of 0.8 from all tokens, and random tokens
at 1.5, whose drafts are never right. Processor time per token after the first. Steps without and with drafts alternate,
so that both meet the same other work; a ratio is the median of the rounds, with the least and the largest, between
which the true median is with a probability of 94% after five rounds. The work is the ratio by counted passes and their
costs in `draft_costs.py`, which no other work disturbs. `transformers` computes in bfloat16 where the processor has
instructions for it, else in float32. The limit is the time to read all weights once, in float16. The last lines compare
losses with those of float32 weights, and the kernels with which a text can be scored.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, markdown, placement, say, write
from indexing.machine import onednn_has_bfloat16
from pipelines.cli.results import Table
from retro.checkpoints.any_model import load_scorer
from retro.device import Placement, choose_placement
from retro.inference.decoder import Decoder
from retro.inference.draft_costs import draft_costs
from retro.inference.drafts import LONGEST_DRAFT
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.packed_kernels import MANY_ROWS
from retro.inference.packed_weights import kernel_for_many, pack_with
from retro.inference.scoring import score_windows, to_score
from retro.inference.settings import GenerationSettings
from retro.model.presets import count_parameters
from retro.model.retro import Retro

_PROMPT_TOKENS = 512
_REPOSITORY = Path(__file__).parents[2]
_TEXTS = [_REPOSITORY / "docs/how-to/serve.md", _REPOSITORY / "retro/inference/decoder.py"]

Prompts = dict[tuple[str, float], np.ndarray]
"""Tokens by name and temperature."""


def prompts_of(model: LanguageModel, texts: list[Path]) -> Prompts:
    """Beginnings of texts, and random tokens."""
    of_texts = {text.stem: model.tokenizer.encode(text.read_text()[:20_000])[:_PROMPT_TOKENS] for text in texts}
    random = np.random.default_rng(0).integers(0, model.tokenizer.num_model_tokens, _PROMPT_TOKENS)
    return {(name, t): np.array(tokens, np.int64) for t in (0.0, 0.8) for name, tokens in of_texts.items()} | {
        ("random tokens", 1.5): random
    }


class _Text:
    """A continuation of a prompt, step by step."""

    def __init__(self, model: LanguageModel, prompt: np.ndarray, settings: GenerationSettings, k: int) -> None:
        self._steps = model.generate([prompt], settings, k)
        self.seconds, self.tokens = 0.0, list[GeneratedToken]()
        self.drafted = list[int]()
        self.tokens += next(self._steps)  # reads the prompt
        self._first = len(self.tokens)

    def step(self) -> bool:
        """Take a step; False if the text was complete."""
        started = time.process_time()
        new = next(self._steps, [])
        self.seconds += time.process_time() - started
        self.tokens += new
        if new:
            self.drafted.append(sum(token.accepted + token.rejected for token in new))
        return bool(new)

    @property
    def seconds_per_token(self) -> float:
        """Processor time after the first step."""
        return self.seconds / (len(self.tokens) - self._first)

    def work(self, costs: np.ndarray) -> float:
        """Passes per token after the first step, as long as one over one token."""
        return float((1 + costs[self.drafted]).sum()) / (len(self.tokens) - self._first)


def ours(model: LanguageModel, prompt: np.ndarray, temperature: float, num_tokens: int, k: int) -> tuple[_Text, _Text]:
    """The text without and with drafts, whose steps alternate as their lengths do."""
    settings = GenerationSettings(max_tokens=num_tokens, temperature=temperature, top_k=0, top_p=1.0, ignore_eos=True)
    plain, drafted = (_Text(model, prompt, replace(settings, drafts=drafts), k) for drafts in (False, True))
    while drafted.step():
        while len(plain.tokens) < len(drafted.tokens):
            plain.step()
    return plain, drafted


class _Clock:
    """A streamer of `transformers`: notes when the prompt was read."""

    calls = 0
    started = 0.0

    def put(self, _: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first is the prompt
            self.started = time.process_time()

    def end(self) -> None:
        """The text is complete."""


def theirs(model: Any, prompt: np.ndarray, temperature: float, num_tokens: int) -> float:
    """Processor time per token after the first one of `generate` of `transformers`."""
    clock = _Clock()
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    model.generate(torch.from_numpy(prompt[None]), streamer=clock, **lengths, **sampling)
    return (time.process_time() - clock.started) / (num_tokens - 1)


def pass_costs(model: LanguageModel, prompt: np.ndarray, rounds: int = 20) -> list[float]:
    """What drafts of 0 to 8 wrong tokens add to a pass, as a share of it: medians of alternating passes."""
    assert isinstance(model.model, Retro)
    decoder = Decoder(model.model, model.placement, model.context)
    row, times = decoder.add(prompt), [list[float]() for _ in range(1 + LONGEST_DRAFT)]
    decoder.read([row])
    for _ in range(rounds):
        for length, of_length in enumerate(times):
            decoder.append(row, 0)
            draft = np.zeros(length, np.int64)
            started = time.process_time()
            decoder.step(lambda *_, draft=draft: draft)
            of_length.append(time.process_time() - started)
    return [statistics.median(of_length) / statistics.median(times[0]) - 1 for of_length in times]


def bandwidth() -> float:
    """Bytes of memory that a sum reads per second."""
    numbers, times = torch.ones(100_000_000), list[float]()
    for _ in range(5):
        started = time.process_time()
        numbers.sum()
        times.append(time.process_time() - started)
    return numbers.nbytes / min(times)


def scoring(model: LanguageModel, prompt: np.ndarray, rounds: int = 5) -> dict[str, float]:
    """Processor seconds to score a prompt with each kernel for many rows, in turn: the shortest of some rounds."""
    scorers = dict[str, tuple[Retro, Placement]]()
    for kernel in (*MANY_ROWS.ways, *(("bfloat16",) if onednn_has_bfloat16() else ())):
        place = choose_placement("cpu", "bfloat16" if kernel == "bfloat16" else "float32")
        scorer = load_scorer(model.checkpoint, place)
        assert isinstance(scorer, Retro)
        pack_with(scorer, kernel)
        place.cast(scorer)
        scorers[kernel] = scorer, place
    times: dict[str, list[float]] = {kernel: [] for kernel in scorers}
    for _ in range(1 + rounds):  # the first round creates kernels
        for kernel, (scorer, place) in scorers.items():
            windows = [window for each in to_score(scorer, [prompt], context=model.context) for window in each.windows]
            started = time.process_time()
            score_windows(scorer, windows, place)
            times[kernel].append(time.process_time() - started)
    return {kernel: min(of_kernel[1:]) for kernel, of_kernel in times.items()}


def losses(model: LanguageModel, prompts: Prompts) -> tuple[float, float]:
    """Mean loss of the tokens of texts in nats: as the model scores them, and in float32."""
    texts = [tokens for (_, temperature), tokens in prompts.items() if temperature == 0]
    exact = choose_placement("cpu", "float32")
    sequences = to_score(load_scorer(model.checkpoint, exact), texts, context=model.context)
    score_windows(load_scorer(model.checkpoint, exact), [w for s in sequences for w in s.windows], exact)
    of_exact = [sequence.scores.log_probabilities for sequence in sequences]
    own, other = (-float(np.concatenate(scores).mean()) for scores in (model.score(texts), of_exact))
    return own, other


def measure(
    model: LanguageModel, other: Any, prompts: Prompts, options: argparse.Namespace, limit: Budget
) -> list[dict[str, Any]]:
    """Seconds per token of all cases, in turn for some rounds; texts with drafts must be those without."""
    rows: dict[tuple[str, float], dict[str, Any]] = {
        key: {"prompt": key[0], "temperature": key[1], "transformers": [], "ours": [], "drafts": []} for key in prompts
    }
    assert isinstance(model.model, Retro)
    costs = draft_costs(model.model)
    for _ in limit.rounds(options.rounds):
        for (name, temperature), prompt in limit.each(list(prompts.items()), "prompt"):
            row, arguments = rows[name, temperature], (prompt, temperature, options.tokens)
            if other is not None:
                row["transformers"].append(theirs(other, *arguments))
            plain, drafted = ours(model, *arguments, options.k)
            row["ours"].append(plain.seconds_per_token)
            row["drafts"].append(drafted.seconds_per_token)
            row["accepted"] = sum(token.accepted for token in drafted.tokens) / len(drafted.tokens)
            row["work"] = 1 / drafted.work(costs)
            row["equal"] = [token.token for token in drafted.tokens] == [token.token for token in plain.tokens]
    return [row for row in rows.values() if row["ours"]]


def table(rows: list[dict[str, Any]], floor: float) -> Table:
    """The rates, and medians of the ratios of each round; `floor` in seconds per token."""

    def ratio(row: dict[str, Any], one: str, other: str) -> str:
        if not row[other]:
            return "–"
        ratios = sorted(b / a for a, b in zip(row[one], row[other], strict=True))
        return f"{statistics.median(ratios):.2f} × ({ratios[0]:.2f} to {ratios[-1]:.2f})"

    names = ("transformers", "ours", "drafts")
    cells = [
        [
            row["prompt"],
            f"{row['temperature']:g}",
            *(f"{1 / statistics.median(row[name]):.1f}" if row[name] else "–" for name in names),
            ratio(row, "ours", "transformers"),
            ratio(row, "drafts", "ours"),
            f"{row['work']:.2f} ×",
            f"{row['accepted']:.0%}",
            "yes" if row["equal"] else "no",
            f"{floor / statistics.median(row['ours']):.2f}",
        ]
        for row in rows
    ]
    header = ["prompt", "temperature", "transformers, tokens/s", "ours", "with drafts", "ours / theirs"]
    return Table([*header, "drafts / without", "by work", "tokens from drafts", "equal", "of the limit"], cells)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="the imported model, or one with retrieval added")
    parser.add_argument("gguf", type=Path, nargs="?", help="the model as transformers reads it; without it, ours alone")
    parser.add_argument("--texts", type=Path, nargs="*", default=_TEXTS)
    parser.add_argument("--k", type=int, default=0, help="neighbors of each chunk that ours reads")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-real-model.json"))
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    model = LanguageModel.open(options.checkpoint, device="cpu", retrieval=bool(options.k))
    prompts = prompts_of(model, options.texts)
    other = None
    if options.gguf is not None:
        from transformers import AutoModelForCausalLM

        folder, file = options.gguf.parent, options.gguf.name
        other = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=placement().dtype).eval()
        theirs(other, next(iter(prompts.values())), 0, 4)  # warm up
    rows = measure(model, other, prompts, options, limit)
    floor = 2 * count_parameters(model.model, embeddings=True) / bandwidth()
    costs = pass_costs(model, next(iter(prompts.values())))
    of_kernels, chosen = scoring(model, next(iter(prompts.values()))), kernel_for_many(model.placement)
    own, exact = losses(model, prompts)
    print(markdown(table(rows, floor)))
    say(f"limit: {1 / floor:.0f} tokens/s. Loss of the texts: {own:.5f} nats a token, in float32 {exact:.5f}")
    say(f"a draft of 0 to {LONGEST_DRAFT} tokens adds to a pass: " + ", ".join(f"{cost:.2f}" for cost in costs))
    of_scoring = ", ".join(f"{kernel} {seconds:.2f} s" for kernel, seconds in of_kernels.items())
    share = min(of_kernels.values()) / of_kernels[chosen]
    say(f"{_PROMPT_TOKENS} tokens are scored in: {of_scoring}. `auto` takes {chosen}, {share:.2f} of the fastest")
    figures = {"floor_seconds": floor, "costs": costs, "scoring": of_kernels, "loss": own, "loss_float32": exact}
    write(options.output, {**figures, "rows": rows})


if __name__ == "__main__":
    main()
