"""The tree of all settings. Each section is defined next to the code that uses it."""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import ClassVar, get_args

from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.documents import CorpusSettings
from indexing.dedup.near_duplicates import DedupSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.store.errors import InputError
from indexing.store.remote import url_of
from indexing.store.settings import NOT_A_KEY, Location, settings
from indexing.store.stages import SkippedStage, left_out
from indexing.tokenization.settings import TokenizerSettings
from pipelines.executors.settings import ExecutorSettings, StageName
from retro.adapters.settings import LoraSettings, check_trained
from retro.data.settings import DataSettings
from retro.evaluation.settings import EvaluationSettings
from retro.finetuning.settings import FinetuneSettings
from retro.model_settings import ModelSettings
from retro.parallel.settings import ParallelSettings
from retro.training.run_settings import RunSettings
from retro.training.settings import TrainSettings

_CHOSEN = "It was removed: retro chooses the value. Delete the key."
_OF_MODEL = "It was removed: only the file of a model sets it. Delete the key."
_RESOURCES = "It was moved to a table by stage: executor.resources.{0}."

REMOVED = {
    "embedder.batch_tokens": _CHOSEN,
    "embedder.fit_chunks": _CHOSEN,
    **{f"executor.{stage}": _RESOURCES.format(stage) for stage in (*get_args(StageName), "train")},
    "index.points_per_list": _CHOSEN,
    "index.tune_queries": _CHOSEN,
    "model.chunk_length": "It was removed: a model has the chunk length of its datastore (chunks.chunk_length). Delete the key.",
    "model.attention.smeared_keys": "It was removed: model.attention.smeared_tokens = 3 is enough. Delete the key.",
    "model.copying_init": "It was removed: model.attention.smeared_tokens includes it. Delete the key.",
    "model.norm_eps": _OF_MODEL,
    "model.retrieval.smeared_keys": "It was removed: the copy head copies instead (model.copy_head). Delete the key.",
    "model.rope.high_freq_factor": _OF_MODEL,
    "model.rope.low_freq_factor": _OF_MODEL,
    "neighbors.retrieval": "It was removed: stored neighbors no longer come from terms. Delete the key.",
    "neighbors.search = lists": "It was removed (commit 4e16f2ed has it): use index, or delete the key.",
    "train.num_threads": "It was removed: set the environment variable OMP_NUM_THREADS. Delete the key.",
    "train.peak_tflops": "It was removed: the peak is the maker's figure, or measured. Delete the key.",
    "tuning": "The section was replaced by train.weights and [lora].",
    "tuning.adapter": "It was replaced by lora.rank: 8 for LoRA, 0 for no adapter.",
    "tuning.virtual_tokens": "It is model.attention.prefix_tokens now, with train.weights = 'none'.",
    "tuning.weights": "It is train.weights now.",
    **{f"tuning.{key}": f"It is lora.{key} now." for key in ("rank", "alpha", "dropout", "targets")},
}
"""Messages for former keys, sections and values (`key = value`)."""


@settings
class Config:
    """Settings of a datastore, a training run and evaluations. One TOML file holds them for all verbs, and an option
    overrides its key."""

    removed: ClassVar[Mapping[str, str]] = REMOVED

    datastore: Location = Path("datastore")
    """Folder of chunks, embeddings, index and neighbors, or an fsspec URL (`s3://bucket/name`)."""
    skip_stages: tuple[SkippedStage, ...] = ()
    """Stages of `retro index` to leave out; by name, `--stage` still runs them. Stages that need them are left out too.
    `neighbors` leaves out `embed`, `train-index`, `add`, `ngrams` and `neighbors`: then models can still copy, and the
    neighbors of new text are searched in the sorted prefixes of `suffixes`. `sparse` is read by sparse and hybrid
    search. `votes` (about 9 bytes for each token) is read by the training of models that copy from the whole datastore,
    `suffixes` (8 to 10 bytes) by their generation, by `votes` and by `retro trace`."""
    run: Location = Path("run")
    """Folder of a training run: resolved settings, metrics, checkpoints."""
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    dedup: DedupSettings = field(default_factory=DedupSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    chunks: ChunkSettings = field(default_factory=ChunkSettings)
    embedder: EmbedderSettings = field(default_factory=EmbedderSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    neighbors: NeighborSettings = field(default_factory=NeighborSettings)
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)
    given: frozenset[str] = field(default=frozenset(), compare=False, metadata=NOT_A_KEY)
    """Keys that the file or the command line set."""

    def __post_init__(self) -> None:
        """Check sections against each other."""
        if url := url_of(self.run):
            raise InputError(f"run = {url!r}: must be a local folder; only datastores can have a URL.")
        if self.neighbors.rerank == "tokens" and self.embedder.kind != "lexical":
            raise InputError(
                f"neighbors.rerank = 'tokens' needs the token weights of embedder.kind = 'lexical', not {self.embedder.kind!r}. "
                "Use neighbors.rerank = 'embeddings'."
            )
        self._check_stages()
        check_trained(self.train.weights, self.lora, self.model.attention.prefix_tokens)

    def _check_stages(self) -> None:
        """Raise InputError if other settings need a stage that `skip_stages` leaves out."""
        neighbors = "needs the stage 'neighbors'"
        reasons = {
            "neighbors.materialized": ("neighbors", self.neighbors.materialized > 0, neighbors),
            "neighbors.extra_datastores": ("neighbors", bool(self.neighbors.extra_datastores), neighbors),
            "neighbors.search": ("ngrams", self.neighbors.search == "ngrams", "= 'ngrams' needs the stage 'ngrams'"),
        }
        out = left_out(self.skip_stages)
        for key, (stage, is_set, reason) in reasons.items():
            # Without neighbors, how they are found has no effect.
            if is_set and stage in out and (stage == "neighbors" or "neighbors" not in out):
                raise InputError(
                    f"skip_stages = {list(self.skip_stages)} leaves out '{stage}', but {key} {reason}. Remove one of both."
                )

    @property
    def run_settings(self) -> RunSettings:
        """The sections of a training run. Without `data.datastores` it reads `datastore`."""
        data = replace(self.data, datastores=self.data.datastores or (self.datastore,))
        return RunSettings(self.model, data, self.train, self.evaluation, self.parallel, self.lora)
