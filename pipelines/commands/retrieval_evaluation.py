"""`retro eval retrieval`: how well a datastore is searched, measured with questions whose answers stand in known documents."""

from dataclasses import asdict, dataclass
from pathlib import Path

from indexing.store.datastore import Datastore
from indexing.store.files import write_json
from pipelines.terminal import print_rows, progress
from retro.question_answering.retrieval_metrics import RetrievalResult, RetrievalSettings


@dataclass(frozen=True)
class EvalRetrievalOptions(RetrievalSettings):
    """hit@k, recall@k and MRR of a question set, over documents, for every way of ordering what is found."""

    also: tuple[str, ...] = ()
    """Further datastores, searched with the first as one."""
    json: str = ""
    """File to write the results to, with the fingerprints of the datastores."""


def evaluate_retrieval(datastore: str, questions: str, options: EvalRetrievalOptions) -> int:
    """`retro eval retrieval DATASTORE QUESTIONS`."""
    from indexing.retrieval.retriever import Retriever
    from retro.question_answering.question_sets import read_questions
    from retro.question_answering.retrieval_metrics import measure, right_documents

    retriever = Retriever.open(datastore, *options.also)
    asked = read_questions(Path(questions))
    asked = asked[: options.max_questions or len(asked)]
    right = right_documents(retriever.retrieval, asked)
    results = []
    for rerank in options.rerank:
        with progress(f"eval retrieval {rerank}", total=len(asked), unit="questions") as advance:
            results.append(measure(retriever, asked, right, rerank, options, advance))
    print_rows(results_rows(results))
    if options.json:
        settings = asdict(options) | {"datastore": datastore, "questions": questions}
        prints = {"datastore": retriever.datastore.fingerprint}
        prints |= {folder: Datastore.open(folder).fingerprint for folder in options.also}
        rows = [asdict(each) for each in results]
        write_json(Path(options.json), {"fingerprints": prints, "settings": settings, "results": rows})
    return 0


def results_rows(results: list[RetrievalResult]) -> list[list[str]]:
    """A table with a row for each way of ordering."""
    ks = list(results[0].hit)
    header = ["ordered by", *(f"hit@{k}" for k in ks), *(f"recall@{k}" for k in ks), "MRR", "questions"]
    rows = []
    for each in results:
        figures = (*each.hit.values(), *each.recall.values(), each.mrr)
        rows.append([each.rerank, *(f"{figure:.3f}" for figure in figures), f"{each.num_questions:,}"])
    return [header, *rows]
