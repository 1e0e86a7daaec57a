"""`retro chat DATASTORE --model NAME`: ask questions, and get answers from passages of a datastore.

question ─► passages ─► prompt ─► answer on standard output as it comes, copied words in blue on a terminal
                                  └► passages with quoted words, copied share, trust ─► standard error, or the JSON
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from indexing.retrieval.results import PASSAGE_TOKENS, PASSAGES
from indexing.store.errors import InputError
from indexing.store.settings import Fraction, settings
from pipelines.cli.results import Format, print_result
from pipelines.cli.verbs.generate import print_runs, print_text, quoted, verbatim_runs
from pipelines.terminal.output import echo, one_line
from retro.inference.settings import GenerationSettings

if TYPE_CHECKING:
    from indexing.retrieval.retriever import Retriever
    from retro.inference.chat_template import ChatTemplate, Message
    from retro.inference.generation import GeneratedToken
    from retro.inference.language_model import LanguageModel
    from retro.inference.passage_prompts import PassagePrompt
    from retro.inference.quotes import GroundedAnswer, Grounding
    from retro.inference.verbatim_runs import TracedDatastore

_K = 2  # neighbors of each chunk where no passage was found
_COPIED = 0.5  # share of a token's probability from which it is shown as copied


@settings
class ChatOptions(GenerationSettings):
    """Ask questions, one a line, and get answers from passages of a datastore. `/new` begins a new conversation, `/quit`
    or Ctrl-D ends.

    The passages that the model read follow each answer on standard error, with the words that are in the answer word for
    word, how much was copied, and how far copying was trusted. On a terminal, copied words are blue.
    """

    model: str = ""
    """The model: a checkpoint with a chat template, such as a file of `retro import` or `retro add-retrieval`. It may
    have another tokenizer than the datastore; then it copies nothing."""
    question: str = ""
    """Answer this question and exit; empty: read questions from standard input."""
    passages: Annotated[int, Field(ge=1, le=100)] = PASSAGES
    """Largest number of passages in the prompt."""
    passage_tokens: PositiveInt = PASSAGE_TOKENS
    """Largest number of tokens of all passages."""
    least_match: Fraction | None = None
    """How much of the question the best passage must say, by terms, 0 to 1; if it says less, the model answers without
    passages. None: 0.25, for Chinese 0.13."""
    copy: bool = True
    """Also copy from the passages and from the datastore, if the model does. `--no-copy`: passages in the prompt only."""
    max_tokens: PositiveInt = 256
    """Largest number of tokens of an answer."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Sampling temperature, at most 100; 0 = always the likeliest token."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.3
    """Subtracted from the logit of a token for each time that the answer contains it, -2 to 2. Without it, small models
    repeat themselves at temperature 0."""
    chat_template: str = ""
    """Jinja file, or folder of a tokenizer with a chat template; empty: that of the model."""
    extra_datastores: tuple[str, ...] = ()
    """More datastores to search together with the first one."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    format: Format = "text"
    """With `--question`, print the answer as `text`, or as `json` with its passages."""

    def __post_init__(self) -> None:
        if not self.model:
            raise InputError(
                "--model is empty: name a model with a chat template, for example the file that `retro import` writes."
            )
        if self.format == "json" and not self.question.strip():
            raise InputError("--format json needs --question.")


def chat(datastore: str, options: ChatOptions) -> int:
    """`retro chat DATASTORE`."""
    from indexing.retrieval.retriever import Retriever

    conversation = Conversation.open(Retriever.open(datastore, *options.extra_datastores), options)
    if options.question.strip():
        turn = conversation.ask(options.question)
        if options.format == "text":
            _show(conversation, turn)
            return 0
        for _ in turn.read():
            pass
        print_result(turn.as_json(), "", options.format)
        return 0
    for question in _questions():
        if question == "/new":
            conversation.messages.clear()
            continue
        try:
            turn = conversation.ask(question)
        except InputError as error:  # of this question: the conversation continues
            echo(f"error: {error}\n", sys.stderr)
            continue
        _show(conversation, turn)
        conversation.keep(question, turn.answer.text)
    return 0


def _questions() -> Iterator[str]:
    """Lines of standard input with text, up to `/quit` or the end."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            echo()
            return
        if line == "/quit":
            return
        if line:
            yield line


@dataclass
class Turn:
    """An answer: the tokens come while `read` is iterated.

    Attributes:
        question: the question.
        prompt: with its passages.
        steps: of the generation.
        answer: collects what is from the passages.
        tokens: generated tokens.
        grounding: what the answer has from its passages, after the last token.
    """

    question: str
    prompt: "PassagePrompt"
    steps: Iterator[list["GeneratedToken"]]
    answer: "GroundedAnswer"
    tokens: list["GeneratedToken"] = field(default_factory=list)

    def read(self) -> Iterator[tuple[str, bool]]:
        """Yield the texts of the tokens, and whether each is copied."""
        for step in self.steps:
            for token in step:
                self.answer.add(token)
                self.tokens.append(token)
                yield token.text, (token.copied_share or 0.0) >= _COPIED

    @cached_property
    def grounding(self) -> "Grounding":
        return replace(self.answer.result(), passages=self.answer.numbered())

    def as_json(self) -> dict[str, Any]:
        """The question, its answer and `retrieval`, as in `/v1/chat/completions`."""
        return {"question": self.question, "answer": self.answer.text.strip(), "retrieval": asdict(self.grounding)}


@dataclass
class Conversation:
    """A model, a datastore, and the questions and answers so far. Passages are searched for each question.

    Attributes:
        retriever: of the datastore.
        model: opened with its retrieval, or without if it copies nothing.
        template: of the model.
        options: of the verb.
        messages: questions and answers so far, without passages.
    """

    retriever: "Retriever"
    model: "LanguageModel"
    template: "ChatTemplate"
    options: ChatOptions
    messages: list["Message"] = field(default_factory=list)

    @classmethod
    def open(cls, retriever: "Retriever", options: ChatOptions) -> "Conversation":
        """Open the model.

        Raises:
            InputError: it cannot be opened, or has no chat template.
        """
        from retro.inference.chat_template import chosen_template

        retriever.chunks.require(retriever.chunks.best)
        model = _open_model(retriever, options)
        template = chosen_template(model.tokenizer, model.checkpoint.settings, options.chat_template)
        if template is None:
            raise InputError(
                f"{options.model} has no chat template, so it cannot answer questions. Name one with --chat-template, a Jinja file or "
                f"the folder of a tokenizer, or continue a text: `retro generate {options.model} --prompt TEXT`."
            )
        return cls(retriever, model, template, options)

    def ask(self, question: str) -> Turn:
        """Search passages for a question and begin to answer it. The oldest questions are left out where the
        conversation is too long.

        Raises:
            InputError: the question alone is too long.
        """
        from retro.inference.chat_template import Message
        from retro.inference.passage_prompts import passages_as_neighbors
        from retro.inference.quotes import GroundedAnswer

        prompt = self._prompt([*self.messages, Message("user", question)])
        copies, given = self.model.retriever is not None, None
        if copies and prompt.passages and self.model.model.settings.retrieves:
            given = [passages_as_neighbors(self.retriever.retrieval, prompt.passages)]
        ends = (*self.options.stop_token_ids, self.template.end_of_turn)
        steps = self.model.generate(
            [prompt.tokens],
            replace(self.options, stop_token_ids=ends),
            _K if copies else 0,
            given,
            sources=copies,
            inserted=[prompt.inserted],
        )
        return Turn(question, prompt, steps, GroundedAnswer(prompt.passages))

    def keep(self, question: str, answer: str) -> None:
        """Add a question and its answer to the conversation."""
        from retro.inference.chat_template import Message

        self.messages += [Message("user", question), Message("assistant", answer.strip())]

    def runs(self, turn: Turn) -> list[Any]:
        """Runs of the answer that occur verbatim in the datastore, if the model copies from it."""
        if self.model.retriever is None:
            return []
        return verbatim_runs(self.model, self._traced, turn.prompt.tokens, turn.tokens)

    @cached_property
    def _traced(self) -> "Sequence[TracedDatastore]":
        from retro.inference.verbatim_runs import is_traced, traced_datastores

        if not any(map(is_traced, self.retriever.retrieval.splits)):
            return []
        return traced_datastores(self.retriever.retrieval, self.model.suffixes)

    def _prompt(self, messages: list["Message"]) -> "PassagePrompt":
        from retro.inference.passage_prompts import PassagePrompt, queries_of, room_for_prompt, write_prompt

        most = room_for_prompt(self.model.context, self.options.max_tokens)
        plain = self._plain(messages, most)
        room = min(self.options.passage_tokens, most - len(plain))
        if room < 1:
            return PassagePrompt(plain, [])
        passages = self.retriever.passages(
            queries_of(messages), self.options.passages, tokens=room, least_match=self.options.least_match
        )
        return write_prompt(self.template, messages, plain, passages, most)

    def _plain(self, messages: list["Message"], most: int) -> np.ndarray:
        """The prompt without passages. The oldest messages are removed from the list, and from the conversation, until
        it fits."""
        while True:
            plain = self.template.prompt(messages)
            if len(plain) <= most:
                return plain
            if len(messages) == 1:
                raise InputError(
                    f"the question has {len(plain):,} tokens; at most {most:,} fit: the model's context of {self.model.context:,} "
                    "minus the answer. Shorten it."
                )
            del messages[:2], self.messages[:2]


def _open_model(retriever: "Retriever", options: ChatOptions) -> "LanguageModel":
    """The model with the datastore, or without it if it cannot copy from it; a line on standard error says why."""
    from retro.checkpoints.checkpoint import open_checkpoint
    from retro.inference.language_model import LanguageModel, imported_tokenizer

    checkpoint = open_checkpoint(Path(options.model))
    copies = options.copy and checkpoint.model.uses_datastore
    if not imported_tokenizer(checkpoint):
        try:
            return LanguageModel.open(options.model, retriever, options.device, retrieval=copies)
        except InputError as error:
            if not checkpoint.datastores:  # no other tokenizer is known
                raise
            if copies:
                echo(f"The model copies nothing: {error}", sys.stderr)
    return LanguageModel.open(options.model, None, options.device, retrieval=False)


def _show(conversation: Conversation, turn: Turn) -> None:
    """Print an answer as it comes, and what it is from."""
    print_text("", turn.read())
    found = turn.grounding
    echo("", sys.stderr)
    for passage in found.passages or ():
        name = one_line("  ".join(filter(None, (passage.document_id, passage.title))))
        texts = [turn.answer.text[slice(*each.text)] for each in found.quotes or () if each.passage == passage.number]
        quotes = {text.casefold(): text for text in reversed(texts)}.values()  # each once
        echo(f"[{passage.number}] {name}{': ' * bool(quotes)}{', '.join(map(quoted, quotes))}", sys.stderr)
    echo(_sentences(found), sys.stderr)
    if turn.tokens:
        print_runs(turn.answer.text, conversation.runs(turn))
    echo("", sys.stderr)


def _sentences(found: "Grounding") -> str:
    """What an answer is from, in words."""
    if not found.passages:
        words = "No passage fits the question, so the answer is from the model alone."
    else:
        words = f"{100 * (found.quoted or 0):.0f}% of the answer's words are in these passages word for word."
    if found.trust is None or found.copied is None:
        return f"{words} Nothing was copied: the model reads passages in its prompt only."
    return f"{words} {100 * found.copied:.0f}% of the answer was copied. {found.trust.sentence()}"
