"""`retro eval retrieval`: quality of a datastore's search on questions with known documents."""

from dataclasses import asdict
from pathlib import Path

from indexing.store.datastore import Datastore
from indexing.store.settings import settings
from pipelines.results import ResultOptions, Table
from pipelines.terminal import progress
from retro.question_answering.retrieval_metrics import RetrievalResult, RetrievalSettings


@settings
class EvalRetrievalOptions(RetrievalSettings, ResultOptions):
    """Measure hit@k, recall@k and MRR over documents, for every way of retrieval."""

    extra_datastores: tuple[str, ...] = ()
    """More datastores to search together with the first one."""


def evaluate_retrieval(datastore: str, questions: str, options: EvalRetrievalOptions) -> int:
    """`retro eval retrieval DATASTORE QUESTIONS`."""
    from indexing.retrieval.retriever import Retriever
    from retro.question_answering.question_sets import read_questions
    from retro.question_answering.retrieval_metrics import measure, right_documents

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
    rows = [asdict(each) for each in results]
    options.deliver({"fingerprints": prints, "settings": settings, "results": rows}, results_table(results).text)
    return 0


def results_table(results: list[RetrievalResult]) -> Table:
    """A row for each way of retrieval."""
    ks = list(results[0].hit)
    header = ["retrieval", *(f"hit@{k}" for k in ks), *(f"recall@{k}" for k in ks), "MRR", "questions"]
    rows = []
    for each in results:
        figures = (*each.hit.values(), *each.recall.values(), each.mrr)
        rows.append([each.retrieval, *(f"{figure:.3f}" for figure in figures), f"{each.num_questions:,}"])
    return Table(header, rows)
