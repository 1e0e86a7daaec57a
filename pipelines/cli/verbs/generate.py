"""`retro generate`: continue prompts token by token, and name the sources of copied words.

LanguageModel.generate ─► tokens, prompt by prompt ─┬─► text on standard output as it comes, copied words in blue on a terminal
                                                    └─► runs copied from neighbors, and runs that occur verbatim in the datastore
                                                        ─► documents, on standard error or in the JSON
"""

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from indexing.store.errors import InputError
from indexing.store.settings import settings
from indexing.suffixes.search import SHORTEST_RUN
from pipelines.cli.results import Format, print_result
from pipelines.terminal.output import echo, echo_shaded, is_colored, one_line
from pipelines.terminal.progress import progress
from pipelines.terminal.units import times
from retro.inference.settings import GenerationSettings

if TYPE_CHECKING:
    from retro.inference.generation import GeneratedToken
    from retro.inference.language_model import LanguageModel
    from retro.inference.source_texts import SourceFinder, Sources
    from retro.inference.verbatim_runs import GeneratedRun, TracedDatastore

_SHORTEST = 2  # tokens of a run whose source is named; single ones are often punctuation


@settings
class GenerateOptions(GenerationSettings):
    """Continue prompts, with retrieval at every chunk boundary.

    The text appears as it is generated. On a terminal, tokens that are copied from a neighbor are blue. The documents
    that longer runs were copied from follow on standard error, with the trust that the prompt earned for retrieval, and
    if the datastore has the stage `suffixes`, the runs of at least 8 tokens that occur in it word for word, with their
    documents.
    """

    prompt: tuple[str, ...] = ("",)
    """Texts to continue, in one batch; an empty text continues from the beginning of a document."""
    chat: bool = False
    """Answer the texts with the chat template of a model that was fine-tuned on instructions, or imported with one."""
    retrieval: bool = True
    """Search neighbors for finished chunks (ON)."""
    k: Annotated[int, Field(ge=0, le=16)] = 2
    """Number of neighbors of each chunk, at most 16; 0 = retrieval OFF."""
    datastore: str = ""
    """Datastore to search; empty: the datastore of the training run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    format: Format = "text"
    """Print the texts, or `json` with prompts, texts, sources, and `trust`, `copied_tokens` and `runs` as in `sources`
    of `retro serve`."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("--prompt has no text. Give one text or more; without the option a document is begun.")


def generate(checkpoint: str, options: GenerateOptions) -> int:
    """`retro generate CHECKPOINT`."""
    from retro.inference.language_model import LanguageModel

    model = LanguageModel.open(checkpoint, options.datastore or None, options.device, retrieval=options.retrieval)
    if options.retrieval and model.retriever is None:
        echo("Without retrieval: the model reads no datastore, so --k changes nothing.", sys.stderr)
    k = options.k if model.retriever is not None else 0
    prompts = _prompts(model, options)
    steps = model.generate(prompts, options, k, sources=k > 0)
    tokens = in_order(steps, len(options.prompt))
    answers = [Answer(*pair, _finder(model, k)) for pair in zip(options.prompt, prompts, strict=True)]
    # Opened after the first text: of a large datastore that takes a while.
    traced = cache(partial(_traced, model))
    if options.format == "text":
        for index, answer in enumerate(answers):
            print_text("───\n" * bool(index) + answer.prompt + "\n" * options.chat, answer.read(tokens))
            _print_trust(answer)
            _print_sources(answer.sources())
            print_runs(answer.text, verbatim_runs(model, traced(), answer.tokens, answer.generated))
        return 0
    with progress("generate", total=len(answers) * options.max_tokens, unit="tokens") as advance:
        for answer in answers:
            for _ in answer.read(tokens):
                advance(1)
    rows: list[dict[str, Any]] = []
    for answer in answers:
        rows.append({"prompt": answer.prompt, "text": answer.text, "sources": answer.sources()})
        rows[-1] |= answer.trusted()
        if traced():
            runs = verbatim_runs(model, traced(), answer.tokens, answer.generated)
            rows[-1]["runs"] = [asdict(run) for run in runs]
    print_result(rows, "", options.format)
    return 0


def in_order(steps: Iterable[list["GeneratedToken"]], num_prompts: int) -> Iterator["GeneratedToken"]:
    """Yield the tokens of the first prompt as they come, then those of the next one. Prompts of a batch advance
    together."""
    waiting = [deque["GeneratedToken"]() for _ in range(num_prompts)]
    row = 0
    for step in steps:
        for token in step:
            waiting[token.row].append(token)
        while row < num_prompts and waiting[row]:
            token = waiting[row].popleft()
            row += token.finish_reason is not None
            yield token


@dataclass
class Answer:
    """The continuation of a prompt.

    Attributes:
        prompt: the prompt.
        tokens: [t] int64, those of the prompt.
        finder: finds the sources; None without retrieval.
        text: the continuation so far.
        generated: its tokens.
        parts: sources of each token.
    """

    prompt: str
    tokens: np.ndarray
    finder: "SourceFinder | None"
    text: str = ""
    generated: list["GeneratedToken"] = field(default_factory=list)
    parts: list["Sources"] = field(default_factory=list)

    def read(self, tokens: Iterator["GeneratedToken"]) -> Iterator[tuple[str, bool]]:
        """Take the tokens up to the last one of the answer; yield their texts, and whether each is copied from a
        neighbor."""
        for token in tokens:
            self.text += token.text
            self.generated.append(token)
            if self.finder is not None:
                self.parts.append(self.finder.add_generated(token))
            yield token.text, bool(self.parts and self.parts[-1].copies)
            if token.finish_reason is not None:
                return

    def trusted(self) -> dict[str, Any]:
        """`trust` in retrieval and `copied_tokens` of the answer; empty if the model copies nothing from retrieval."""
        from retro.inference.source_texts import joined

        sources = joined(self.parts)
        if sources is None or sources.trust is None:
            return {}
        return {"trust": asdict(sources.trust), "copied_tokens": sources.copied_tokens}

    def sources(self) -> list[dict[str, Any]]:
        """The documents that runs were copied from: `document_id`, `title` and `runs`, in the order of the text."""
        from retro.inference.source_texts import joined

        documents: dict[str, dict[str, Any]] = {}
        sources = joined(self.parts)
        hits = {chunk.chunk: chunk.neighbors for chunk in sources.chunks} if sources else {}
        for run in sources.copies if sources else ():
            text, hit = self.text[slice(*run.text)], hits[run.chunk][run.neighbor]
            if run.tokens >= _SHORTEST and text.strip():
                row = {"document_id": hit.document_id, "title": hit.title, "runs": []}
                documents.setdefault(hit.document_id, row)["runs"].append(text)
        return list(documents.values())


def _finder(model: "LanguageModel", k: int) -> "SourceFinder | None":
    if not k or model.retriever is None:
        return None
    from retro.inference.source_texts import SourceFinder
    from retro.inference.spans import ChunkTexts

    return SourceFinder(model.retriever, ChunkTexts(model.retriever))


def _traced(model: "LanguageModel") -> "list[TracedDatastore]":
    """The model's datastores that have the stage `suffixes`."""
    from retro.inference.verbatim_runs import is_traced, traced_datastores

    if model.retriever is None or not any(map(is_traced, model.retriever.retrieval.splits)):
        return []
    return traced_datastores(model.retriever.retrieval, model.suffixes)


def verbatim_runs(
    model: "LanguageModel",
    datastores: "Sequence[TracedDatastore]",
    prompt: np.ndarray,
    generated: Iterable["GeneratedToken"],
    least: int = SHORTEST_RUN,
) -> "list[GeneratedRun]":
    """The runs of a generated text that occur verbatim in datastores, grouped as in the answers of the server.

    Args:
        model: the model, with a retriever unless there are no datastores.
        datastores: that are searched.
        prompt: [t] token ids.
        generated: all tokens after it.
        least: tokens of the shortest run.
    """
    from retro.inference.spans import ChunkTexts
    from retro.inference.verbatim_runs import GeneratedRuns, grouped_runs

    if not datastores or model.retriever is None:
        return []
    finder = GeneratedRuns(datastores, ChunkTexts(model.retriever), prompt, least=least)
    return grouped_runs([run for token in generated for run in finder.add(token)])


def print_text(prompt: str, pieces: Iterable[tuple[str, bool]]) -> None:
    """Print a prompt with the first piece of its continuation, then each piece as it comes; on a terminal, copied ones
    in blue."""
    colored = is_colored(sys.stdout)
    try:
        for text, is_copied in pieces:
            echo_shaded([(prompt, 0), (text, int(is_copied and colored))], end="")
            prompt = ""
    finally:  # also after Ctrl-C
        echo()


def _print_trust(answer: Answer) -> None:
    """Print on standard error how far retrieval was trusted, and how many tokens were copied."""
    from retro.inference.trust import Trust

    if trusted := answer.trusted():
        copied = f"{trusted['copied_tokens']:,.1f} of {len(answer.generated):,} tokens were copied."
        echo(f"\n{Trust(**trusted['trust']).sentence()} {copied}", sys.stderr)


def _print_sources(sources: list[dict[str, Any]]) -> None:
    """Print a line for each document on standard error: its id, its title, and the runs in quotation marks."""
    if sources:
        echo("\ncopied from:", sys.stderr)
    for source in sources:
        name = one_line("  ".join(filter(None, (source["document_id"], source["title"]))))
        echo(f"   {name}: {', '.join(map(quoted, source['runs']))}", sys.stderr)


def print_runs(text: str, runs: "Sequence[GeneratedRun]") -> None:
    """Print a line for each verbatim run on standard error: its documents, the run in quotation marks, its length, how
    often it occurs."""
    if named := [run for run in runs if is_named(run)]:
        echo("\noccurs verbatim in:", sys.stderr)
    for run in named:
        documents = ", ".join(one_line(place.document_id) for place in run.places)
        more = ", …" * (run.occurrences > len(run.places))
        prompt = f", {run.prompt_tokens:,} of them in the prompt" if run.prompt_tokens else ""
        figures = f"{run.tokens:,} tokens{prompt}; {times(run.occurrences)}{such(run.count)}"
        echo(f"   {documents}{more}: {quoted(text[slice(*run.text)])} ({figures})", sys.stderr)


def such(count: int) -> str:
    """How many runs of a text a run stands for, after other figures; empty for itself alone."""
    return f"; {count:,} such runs in the text" if count > 1 else ""


def is_named(run: "GeneratedRun") -> bool:
    """Whether a verbatim run has enough generated tokens to be shown."""
    return run.tokens - run.prompt_tokens >= _SHORTEST


def quoted(run: str) -> str:
    """A run in quotation marks, on one line."""
    return '"' + re.sub(r"\s*\n\s*", " ⏎ ", run.strip()) + '"'


def _prompts(model: "LanguageModel", options: GenerateOptions) -> list[np.ndarray]:
    """The tokens of each prompt."""
    tokenizer = model.tokenizer
    if options.chat:
        from retro.inference.chat_template import Message, template_of

        template = template_of(tokenizer, model.checkpoint.settings)
        return [template.prompt([Message("user", prompt)]) for prompt in options.prompt]
    return [np.append(tokenizer.bos_id, tokenizer.encode(prompt)).astype(np.int64) for prompt in options.prompt]
