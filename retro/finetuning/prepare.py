"""Prepare files of examples once for a run: tokens and labels in chunks, and the neighbors of each chunk.

    RUN/examples/1a2b…/  shards.json   00000/  00001/ …                                                  each is an artifact:
        tokens.npy [chunks, m]   labels.npy [chunks, m]   neighbors.npy [chunks, k]       neighbor = row of the two arrays below,
        neighbor_tokens.npy [rows, 2m]   neighbor_lengths.npy [rows]                      -1 = none
        lengths.npy   first_labels.npy   places.npy [examples]   lines.npy [examples, 2]

An example of t tokens has t - 1 positions. The label of a position is the next token if that belongs to an answer. An
example starts a new chunk, and padding fills its last one. The neighbors of a chunk are read while the next chunk is
predicted, so the last chunk has none. After a kill, preparation resumes at the next shard. The folder's name is the
fingerprint of files and settings, so examples with other settings get another folder.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from indexing.retrieval.retriever import Retriever
from indexing.store.artifact import Recipe, create, is_finished
from indexing.store.datastore import Datastore, shard_name
from indexing.store.errors import InputError
from indexing.store.files import checksum, read_json, save_array, write_json
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.store.schemas import MOST_SHARDS, parsed
from indexing.tokenization.language import Language, language_of
from indexing.tokenization.tokenizer import Tokenizer
from retro.batch.loss import IGNORED_LABEL
from retro.evaluation.neighbor_prompts import NeighborPassage, QuestionFormat, find_neighbor_passages
from retro.evaluation.question_sets import Question, read_numbered_questions
from retro.finetuning.conversations import read_conversations
from retro.finetuning.settings import FinetuneSettings
from retro.inference.chat_template import ChatTemplate, Conversation, Written, read_template

log = logging.getLogger("retro")

_SHARDS = "shards.json"
_VERSION = 1
_SHARD_EXAMPLES = 4096


class NumberedExample(NamedTuple):
    """An example, the number of its file (from 0) and of its line (from 1)."""

    file: int
    number: int
    example: Conversation | Question


class Neighbors(NamedTuple):
    """The neighbors of C chunks, with each text stored once.

    Attributes:
        rows: [C, k] int64, rows of `tokens` and `lengths`; -1 = none.
        tokens: [P, 2m] int64.
        lengths: [P] int64.
    """

    rows: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray


def prepare(run: Path, datastores: Sequence[Path], settings: FinetuneSettings, k: int) -> Path:
    """The folder of the prepared examples of a run; prepares them if needed. See `preparation`."""
    return next(folder for folder in preparation(run, datastores, settings, k) if folder)


class _Shards(TypedDict):
    shards: Annotated[int, Field(ge=0, le=MOST_SHARDS)]


def num_shards(folder: Path) -> int:
    """The number of shards of prepared examples."""
    return parsed(_Shards, read_json(folder / _SHARDS), folder / _SHARDS)["shards"]


def preparation(run: Path, datastores: Sequence[Path], settings: FinetuneSettings, k: int) -> Iterator[Path | None]:
    """Prepare shard by shard, so that other processes can wait for each: yields None after a shard, and at last the
    folder.

    Args:
        run: the run's folder.
        datastores: the first has the tokenizer, and neighbors are found in all of them.
        settings: files and formats.
        k: neighbors of a chunk; 0 = no search.

    Raises:
        InputError: an unusable file or line, template or datastore.
    """
    recipe = recipe_of(datastores, settings, k)
    folder = run / "examples" / recipe.fingerprint
    if (folder / _SHARDS).exists():
        numbers = range(num_shards(folder))
        if all(is_finished(folder / shard_name(number), _shard_recipe(recipe, number)) for number in numbers):
            yield folder
            return
    writer = _Writer.open(datastores, settings, k)
    lines, number, total = read_lines(settings), 0, 0
    while block := list(islice(lines, _SHARD_EXAMPLES)):
        shard, of_shard = folder / shard_name(number), _shard_recipe(recipe, number)
        if not is_finished(shard, of_shard):
            with create(shard, of_shard) as (work, counts):
                for name, array in writer.arrays(block).items():
                    save_array(work / f"{name}.npy", array)
                    counts[name] = len(array)
        number, total = number + 1, total + len(block)
        log.info("examples: %s prepared, with %d neighbors of each chunk", f"{total:,}", k)
        yield None
    if not number:
        raise InputError(f"finetune.examples: {', '.join(map(str, settings.examples)) or 'no files'}: no examples.")
    write_json(folder / _SHARDS, {"shards": number})
    yield folder


def recipe_of(datastores: Sequence[Path], settings: FinetuneSettings, k: int) -> Recipe:
    """The settings and inputs that prepared examples depend on.

    Raises:
        InputError: a file of examples, the template or the datastore is missing.
    """
    opened = [Datastore.open(location) for location in datastores]
    inputs = {"tokenizer": tokenizer_fingerprint(opened[0].folder)}
    inputs |= {f"datastore {index}": datastore.fingerprint for index, datastore in enumerate(opened if k else ())}
    for number, path in enumerate(settings.examples):
        try:
            inputs[f"examples {number}"] = checksum(path)
        except OSError as error:
            raise InputError(f"finetune.examples: {path} cannot be read: {error.strerror}.") from error
    names = ["format", "language"] + ["retrieval", "positives_first"] * (settings.format == "questions")
    chosen = {f"finetune.{name}": getattr(settings, name) for name in names}
    template = read_template(settings.template)
    return Recipe("examples", _VERSION, {**chosen, "finetune.template": template, "data.k": k}, inputs)


def _shard_recipe(recipe: Recipe, number: int) -> Recipe:
    return replace(recipe, settings={**recipe.settings, "shard": number})


def read_lines(settings: FinetuneSettings) -> Iterator[NumberedExample]:
    """The examples of all files, in order.

    Raises:
        InputError: an unusable line; the message names file and line.
    """
    for file, path in enumerate(settings.examples):
        if settings.format == "instructions":
            yield from (NumberedExample(file, line, conversation) for line, conversation in read_conversations(path))
            continue
        for number, question in read_numbered_questions(path):
            if not question.answers or not question.answers[0].strip():
                raise InputError(f'{path}:{number} has no "answers": a question needs at least one.')
            yield NumberedExample(file, number, question)


@dataclass(frozen=True)
class _Writer:
    """Lines → arrays.

    Attributes:
        settings: formats.
        tokenizer: the datastore's.
        template: of conversations.
        retriever: finds neighbors; None = no neighbors.
        chunk_length: m.
        k: neighbors of a chunk.
    """

    settings: FinetuneSettings
    tokenizer: Tokenizer
    template: ChatTemplate
    retriever: Retriever | None
    chunk_length: int
    k: int

    @classmethod
    def open(cls, datastores: Sequence[Path], settings: FinetuneSettings, k: int) -> "_Writer":
        datastore = Datastore.open(datastores[0])
        retriever = Retriever.open(*datastores) if k else None
        if retriever is not None:
            retriever.require_neighbors()
        tokenizer = retriever.tokenizer if retriever else Tokenizer.open(datastore.folder / "tokenizer")
        template = ChatTemplate(tokenizer, read_template(settings.template), settings.language)
        if settings.format == "instructions":
            template.check()
        return cls(settings, tokenizer, template, retriever, datastore.chunk_length, k)

    def arrays(self, block: Sequence[NumberedExample]) -> dict[str, np.ndarray]:
        """The arrays of a shard by name."""
        m = self.chunk_length
        written = [self._written(line) for line in block]
        lengths = np.array([len(example.tokens) - 1 for example in written], dtype=np.int64)
        counts = -(-lengths // m)  # chunks of each
        tokens = np.full((counts.sum(), m), self.tokenizer.pad_id, dtype=self.tokenizer.dtype)
        labels = np.full((counts.sum(), m), IGNORED_LABEL, dtype=np.int32)
        for example, first, length in zip(written, (np.cumsum(counts) - counts) * m, lengths, strict=True):
            tokens.reshape(-1)[first : first + length] = example.tokens[:-1]
            labels.reshape(-1)[first : first + length] = np.where(example.is_answer, example.tokens, IGNORED_LABEL)[1:]
        neighbors = self._neighbors(block, tokens.astype(np.int64), counts)
        neighbors.rows[np.cumsum(counts) - 1] = -1
        return {
            "tokens": tokens,
            "labels": labels,
            "neighbors": neighbors.rows,
            "neighbor_tokens": neighbors.tokens.astype(self.tokenizer.dtype),
            "neighbor_lengths": neighbors.lengths,
            "lengths": lengths,
            "first_labels": np.array([example.is_answer.argmax() - 1 for example in written], dtype=np.int64),
            "lines": np.array([line[:2] for line in block], dtype=np.int64),
            "places": np.array([place_of(line.example) for line in block], dtype=np.uint64),
        }

    def _written(self, line: NumberedExample) -> Written:
        if isinstance(line.example, Question):
            form = self._format(line.example)
            prompt, answer = form.prompt(line.example.question), form.answer(line.example.answers[0])
            return Written(np.concatenate((prompt, answer)), np.arange(len(prompt) + len(answer)) >= len(prompt))
        try:
            return self.template.write(line.example)
        except InputError as error:
            raise InputError(f"{self.settings.examples[line.file]}:{line.number}: {error}") from error

    def _format(self, question: Question) -> QuestionFormat:
        chosen = self.settings.language
        language: Language = language_of([question.question]) if chosen == "auto" else chosen
        return QuestionFormat(self.tokenizer, self.chunk_length, language)

    def _neighbors(self, block: Sequence[NumberedExample], tokens: np.ndarray, counts: np.ndarray) -> Neighbors:
        """The neighbors of chunks [C, m]; `counts` [examples] are the chunks of each example."""
        if self.retriever is None:
            none = np.empty((0, 2 * self.chunk_length), dtype=np.int64)
            return Neighbors(np.full((len(tokens), 0), -1, dtype=np.int64), none, np.empty(0, dtype=np.int64))
        if self.settings.format == "instructions":
            return found_by_chunk(self.retriever, tokens, counts, self.k)
        questions = [line.example for line in block if isinstance(line.example, Question)]
        passages = find_neighbor_passages(
            self.retriever,
            questions,
            self.k,
            retrieval=self.settings.retrieval,
            positives_first=self.settings.positives_first,
        )
        return of_questions([self._format(question) for question in questions], passages, counts, self.k)


def found_by_chunk(retriever: Retriever, tokens: np.ndarray, counts: np.ndarray, k: int) -> Neighbors:
    """Search neighbors for each chunk [C, m], except the last one of each example."""
    searched = np.ones(len(tokens), dtype=bool)
    searched[np.cumsum(counts) - 1] = False
    chunks = tokens[searched]
    neighbor_ids = np.full((len(tokens), k), -1, dtype=np.int64)
    if len(chunks):
        vectors = retriever.embedder.embed(chunks, np.full(len(chunks), tokens.shape[1], dtype=np.int64))
        neighbor_ids[searched] = retriever.chunks.nearest(vectors, k)[0]
    ids, rows = np.unique(neighbor_ids, return_inverse=True)
    rows = rows.reshape(neighbor_ids.shape)
    if len(ids) and ids[0] < 0:  # none
        ids, rows = ids[1:], rows - 1
    return Neighbors(rows.astype(np.int64), *retriever.retrieval.with_continuation(ids))


def of_questions(
    formats: Sequence[QuestionFormat], passages: Sequence[Sequence[NeighborPassage]], counts: np.ndarray, k: int
) -> Neighbors:
    """The passages of each question, which all of its chunks read. A passage in one language is stored once."""
    numbers: dict[tuple[QuestionFormat, NeighborPassage], int] = {}
    rows = np.full((len(passages), k), -1, dtype=np.int64)
    for question, (form, chosen) in enumerate(zip(formats, passages, strict=True)):
        for place, passage in enumerate(chosen):
            rows[question, place] = numbers.setdefault((form, passage), len(numbers))
    keys = list(numbers)
    tokens = np.empty((len(keys), 2 * formats[0].chunk_length), dtype=np.int64)
    lengths = np.empty(len(keys), dtype=np.int64)
    for form in set(formats):
        of_form = [index for index, key in enumerate(keys) if key[0] == form]
        tokens[of_form], lengths[of_form] = form.neighbors([keys[index][1] for index in of_form], len(of_form))
    return Neighbors(np.repeat(rows, counts, axis=0), tokens, lengths)


def place_of(example: Conversation | Question) -> int:
    """A 64-bit hash of an example's question, which decides whether it is held out: equal questions stay together."""
    question = (
        [example.question]
        if isinstance(example, Question)
        else [message.content for message in example if message.role != "assistant"]
    )
    digest = blake2b("\n".join(question).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
