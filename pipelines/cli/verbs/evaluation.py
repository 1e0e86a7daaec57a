"""Verbs that evaluate a model."""

import logging
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.store.settings import Fraction, Text, settings
from pipelines.cli.results import ResultOptions
from pipelines.terminal.progress import progress
from pipelines.terminal.units import counted
from retro.evaluation.retrieval_metrics import RetrievalSettings
from retro.evaluation.settings import EvaluationSettings, PerplexitySettings, QaSettings, TextWindows

if TYPE_CHECKING:
    from retro.checkpoints.checkpoint import Checkpoint
    from retro.evaluation.bits_per_byte import SetResult
    from retro.evaluation.sets import EvaluationSet

log = logging.getLogger("retro")


@settings
class EvalOptions(ResultOptions):
    """Measure bits per byte and perplexity of held-out documents, with retrieval OFF and ON.

    MODEL is any decoder of transformers: a folder, a name on the Hugging Face Hub, a `.gguf` file. It
    needs `--datastore`, made with its tokenizer."""

    k: tuple[PositiveInt, ...] = (2,)
    """Numbers of neighbors to measure with retrieval ON."""
    max_overlap: Fraction | None = None
    """Skip neighbors whose longest run of tokens in common with the chunk, or with the next chunk, is more than this
    fraction of it, for all models, and votes of the datastore after a match that is longer than this fraction of a
    chunk. 1 = skip none; None = the `data.max_overlap` of each model's run."""
    against: str = ""
    """Another checkpoint, for example a baseline, to score on the same sets and windows and to compare with."""
    datastore: str = ""
    """Datastore whose held-out documents are scored; empty: the datastores of the training run."""
    leakage_from: str = ""
    """Datastore of the same chunks whose votes, or else nearest neighbors, define leakage; empty: the datastore of each
    set."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    texts: tuple[Text, ...] = ()
    """Also measure texts that are not in the datastore: files, folders or globs, as in `corpus.paths`. Each path is a
    row, OFF and ON with the largest k, of at most `evaluation.max_tokens` tokens (0 = 20,000) of a random sample of its
    documents. Neighbors and votes are searched as in generation."""
    text_windows: TextWindows = "random"
    """Measure a `random` window of each of these texts (`evaluation.seed`), or its `beginning`. Beginnings of source
    code are licenses and imports, which occur everywhere: with them retrieval saves twice as much."""
    held_out: bool = True
    """Measure the held-out documents of the datastores. `--no-held-out` measures `--texts` only."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        if self.held_out:
            return
        if not self.texts:
            raise InputError("--no-held-out: nothing is left to measure. Name texts with --texts, or remove it.")
        of_sets: dict[str, object] = {
            "--against": self.against,
            "--leakage-from": self.leakage_from,
            "--evaluation.sets": self.evaluation.sets,
        }
        of_sets["--evaluation.datastore-fractions"] = self.evaluation.datastore_fractions
        if given := [option for option, value in of_sets.items() if value]:
            raise InputError(
                f"{given[0]} is about held-out documents, which --no-held-out leaves out. Remove one of both."
            )

    @property
    def settings(self) -> PerplexitySettings:
        """The section, and the options that say what is measured."""
        options = {name: getattr(self, name) for name in ("k", "max_overlap", "texts", "text_windows")}
        return PerplexitySettings(**vars(self.evaluation), **options)


def evaluate(checkpoint: str, options: EvalOptions) -> int:
    """`retro eval perplexity CHECKPOINT|MODEL`."""
    from pipelines.cli.verbs.evaluation_tables import gains_of, tables_of
    from retro.checkpoints.any_model import for_datastore, open_model
    from retro.evaluation.other_texts import check_texts, evaluate_texts, text_files
    from retro.evaluation.perplexity import check_fractions, evaluate_checkpoints, rules_of, settings_of
    from retro.evaluation.sets import open_sets
    from retro.inference.language_model import LanguageModel

    settings = options.settings
    opened = [open_model(Path(path)) for path in (checkpoint, options.against) if path]
    check_fractions(opened, settings)
    check_texts(opened[0], settings)
    folders = [options.datastore] if options.datastore else opened[0].folders
    opened = [for_datastore(one, folders[0]) for one in opened]
    k = max(settings.k, default=0) if any(one.model.retrieves for one in opened) else 0
    sets = (
        open_sets(settings.sets, [Path(folder) for folder in folders], opened[0].model, k) if options.held_out else []
    )
    for one in opened:
        _check_ids(one, sets)
    if not (sets or settings.texts):
        raise InputError(
            f"{checkpoint}: its datastores have no held-out documents; name documents with --evaluation.sets or --texts."
        )
    source = Datastore.open(options.leakage_from) if options.leakage_from else None
    # First, because their errors are found while they are read.
    texts = []
    if files := text_files(settings):
        model = LanguageModel.open(opened[0].path, options.datastore or None, options.device)
        texts = evaluate_texts(model, files, settings, progress, _say)
    results: dict[str, Any] = {
        "fingerprints": {
            **dict(zip(("checkpoint", "against"), (one.fingerprint for one in opened), strict=False)),
            "datastores": {evaluation_set.name: evaluation_set.datastore.fingerprint for evaluation_set in sets},
        },
        "settings": settings_of(opened, sets, settings, source),
        **evaluate_checkpoints(opened, sets, settings, options.device, source, progress, _say),
        "texts": texts,
    }
    blocks = [rules_of(opened, settings)]
    blocks += [f"{title}\n{table.text}" for title, table in tables_of(results).items()]
    if sentences := gains_of(results, opened[0].model):
        results["gains"] = sentences
        blocks.append("\n".join(sentences))
    options.deliver(results, "\n\n".join(filter(None, blocks)))
    return 0


def _say(result: "SetResult") -> None:
    """Log a measurement when it is there: the tables come after all of them."""
    log.info(
        "%s %s: %.4f bits per byte, %s tokens of %s",
        *(result.set, result.label, result.bits_per_byte, f"{result.tokens:,}", counted(result.documents, "document")),
    )


def _check_ids(checkpoint: "Checkpoint", sets: "list[EvaluationSet]") -> None:
    for evaluation_set in sets:
        checkpoint.check_fits(
            evaluation_set.datastore.manifest,
            f"evaluation set {evaluation_set.name!r}: {evaluation_set.datastore.folder}",
            tokenizer=tokenizer_fingerprint(evaluation_set.datastore.folder),
        )


@settings
class EvalQaOptions(QaSettings, ResultOptions):
    """Measure exact match and F1 of answers to questions: closed book, with passages in the prompt, with passages as
    neighbors, and with retrieval ON. With `--output`, the same command continues a measurement that was stopped."""

    passages: str = ""
    """Datastore to search for passages. Retrieval ON then searches it too; empty: retrieval ON searches the datastore
    of the training run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""


def evaluate_qa(checkpoint: str, questions: str, options: EvalQaOptions) -> int:
    """`retro eval qa CHECKPOINT QUESTIONS`."""
    from pipelines.cli.verbs.evaluation_tables import answers_table
    from retro.evaluation import question_answering as answering
    from retro.evaluation.answer_journal import AnswerJournal
    from retro.evaluation.question_sets import read_questions

    path = Path(questions)
    shots, chosen = answering.select(read_questions(path), options, path)
    language = answering.language_for(chosen, options)
    model, retriever = answering.open_model(Path(checkpoint), options.passages or None, options, options.device)
    prints = {"checkpoint": model.checkpoint.fingerprint}
    prints |= {"passages": retriever.datastore.fingerprint} if retriever else {}
    prints |= {"datastore": model.retriever.datastore.fingerprint} if model.retriever else {}
    settings = asdict(options) | {"checkpoint": checkpoint, "questions": questions, "language": language}
    asked = [asdict(question) for question in (*shots, *chosen)]
    journal = AnswerJournal(_unfinished(options.output), {"fingerprints": prints, "settings": settings, "asked": asked})
    found = answering.found_passages(retriever, chosen, options, progress) if retriever else None
    modes = answering.all_modes(model, chosen, options, language=language, shots=shots, found=found)
    rows = answering.measure_answers(model, modes, chosen, options, language, journal, progress)
    answers = answering.as_json(rows, chosen, options.seed)
    results: dict[str, Any] = {"fingerprints": prints, "settings": settings, **answers}
    options.deliver(results, answers_table(results["results"]).text)
    journal.remove()
    return 0


def _unfinished(output: str) -> Path | None:
    """The file of the answers of a measurement that is not finished, next to that of its results."""
    return Path(output).with_suffix(".unfinished.jsonl") if output else None


@settings
class EvalRetrievalOptions(RetrievalSettings, ResultOptions):
    """Measure hit@k, recall@k and MRR over documents, for every way of retrieval."""

    extra_datastores: tuple[str, ...] = ()
    """More datastores to search together with the first one."""


def evaluate_retrieval(datastore: str, questions: str, options: EvalRetrievalOptions) -> int:
    """`retro eval retrieval DATASTORE QUESTIONS`."""
    from indexing.retrieval.retriever import Retriever
    from pipelines.cli.verbs.evaluation_tables import retrieval_table
    from retro.evaluation.question_sets import read_questions
    from retro.evaluation.retrieval_metrics import measure, right_documents

    retriever = Retriever.open(datastore, *options.extra_datastores)
    chosen = read_questions(Path(questions))
    chosen = chosen[: options.max_questions or len(chosen)]
    right = right_documents(retriever.retrieval, chosen)
    results = []
    for retrieval in options.retrieval:
        with progress(f"eval retrieval {retrieval}", total=len(chosen), unit="questions") as advance:
            results.append(measure(retriever, chosen, right, retrieval, options, advance))
    settings = asdict(options) | {"datastore": datastore, "questions": questions}
    prints = {"datastore": retriever.datastore.fingerprint}
    prints |= {folder: Datastore.open(folder).fingerprint for folder in options.extra_datastores}
    rows = [asdict(result) for result in results]
    options.deliver({"fingerprints": prints, "settings": settings, "results": rows}, retrieval_table(results).text)
    return 0


@settings
class EvalHarnessOptions(ResultOptions):
    """Run tasks of EleutherAI's lm-evaluation-harness, with retrieval ON or
    OFF. `python -m retro.evaluation.lm_eval_adapter` has all options of the harness."""

    tasks: tuple[str, ...] = ()
    """Names of tasks or groups; wildcards are allowed."""
    include_path: str = ""
    """Folder with YAML files of further tasks."""
    retrieval: bool = True
    """Search neighbors for complete chunks (ON)."""
    k: int = 2
    """Neighbors of each chunk."""
    datastore: str = ""
    """Datastore to search; empty: the datastore of the training run."""
    shots: int = -1
    """Solved examples before each question; -1 = the task's own number."""
    limit: int = 0
    """Number of examples of each task; 0 = all."""
    batch_size: int = 8
    """Sequences in a batch."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""


def evaluate_harness(checkpoint: str, options: EvalHarnessOptions) -> int:
    """`retro eval harness CHECKPOINT --tasks TASK …`."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        from retro.evaluation.lm_eval_adapter import RetroLM
    except ImportError as error:
        raise InputError(
            f"retro eval harness needs the package lm-eval ({error}): pip install 'retro[lm-eval]'."
        ) from error
    if not options.tasks:
        raise InputError("--tasks is empty: name tasks of lm-eval; `lm-eval ls tasks` lists them.")
    manager = TaskManager(include_path=options.include_path or None, include_defaults=not options.include_path)
    unknown = [name for name in options.tasks if not manager.match_tasks([name])]
    if unknown and options.include_path:  # reading the tasks of lm-eval takes seconds
        manager = TaskManager(include_path=options.include_path)
        unknown = [name for name in options.tasks if not manager.match_tasks([name])]
    if unknown:
        raise InputError(f"--tasks {unknown[0]}: lm-eval has no such task; `lm-eval ls tasks` lists them.")
    model = RetroLM(
        checkpoint,
        options.datastore,
        retrieval=options.retrieval,
        k=options.k,
        batch_size=options.batch_size,
        device=options.device,
    )
    results = simple_evaluate(
        model,
        tasks=manager.match_tasks(list(options.tasks)),
        num_fewshot=options.shots if options.shots >= 0 else None,
        limit=options.limit or None,
        batch_size=options.batch_size,
        task_manager=manager,
        log_samples=False,
    )
    assert results is not None  # only processes other than rank 0 get None
    settings = {"checkpoint": checkpoint} | asdict(options)
    figures = {key: results[key] for key in ("results", "versions", "n-shot", "n-samples", "higher_is_better")}
    options.deliver({**model.get_model_info(), "settings": settings, **figures}, make_table(results))
    return 0
