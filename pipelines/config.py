"""The tree of all settings. Each section is defined next to the code that uses it."""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import ClassVar, Literal

from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.readers import CorpusSettings
from indexing.dedup.near_duplicates import DedupSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.index.build import IndexSettings
from indexing.neighbors.search import NeighborSettings
from indexing.store.errors import InputError
from indexing.store.remote import url_of
from indexing.store.settings import Location, settings
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.executors.settings import ExecutorSettings
from retro.adapters.settings import TuningSettings
from retro.data.settings import DataSettings
from retro.evaluation.settings import EvaluationSettings
from retro.finetuning.settings import FinetuneSettings
from retro.model.settings import PAPER_PRESETS, ModelSettings
from retro.parallel.settings import ParallelSettings
from retro.training.run_settings import RunSettings
from retro.training.settings import TrainSettings


@settings
class Config:
    """All settings of a datastore and a training run, in one TOML file for every verb."""

    removed: ClassVar[Mapping[str, str]] = {
        "neighbors.retrieval": "It was removed: stored neighbors no longer come from terms. Delete the key.",
        "model.attention.smeared_keys": "It was removed: model.attention.smeared_tokens = 3 is enough. Delete the key.",
        "model.copying_init": "It was removed: model.attention.smeared_tokens includes it. Delete the key.",
        "model.retrieval.smeared_keys": "It was removed: the copy head copies instead (model.copy_head). Delete the key.",
        "tuning.virtual_tokens": "It was removed with prefixes and prompts: use tuning.adapter = 'lora'. Delete the key.",
    }

    datastore: Location = Path("datastore")
    """Folder of chunks, embeddings, index and neighbors, or an fsspec URL (`s3://bucket/name`)."""
    skip_stages: tuple[Literal["suffixes", "votes"], ...] = ()
    """Stages of `retro index` to leave out; by name, `--stage` still runs them. `votes` (10 to 16 bytes for each token) is read by
    the training of models that copy from the whole datastore, `suffixes` (4 bytes) by their generation, by `votes` and by
    `retro trace`."""
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
    tuning: TuningSettings = field(default_factory=TuningSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)

    def __post_init__(self) -> None:
        """Fill in the defaults of a section that depend on others, and check sections against each other."""
        if url := url_of(self.run):
            raise InputError(f"run = {url!r}: must be a local folder; only datastores can have a URL.")
        paper = self.model.preset in PAPER_PRESETS
        if not self.chunks.chunk_length:
            object.__setattr__(self, "chunks", replace(self.chunks, chunk_length=64 if paper else 32))
        if self.neighbors.rerank == "auto":
            by_tokens = self.embedder.kind == "lexical" and not paper
            neighbors = replace(self.neighbors, rerank="tokens" if by_tokens else "embeddings")
            object.__setattr__(self, "neighbors", neighbors)
        if self.neighbors.rerank == "tokens" and self.embedder.kind != "lexical":
            raise InputError(
                f"neighbors.rerank = 'tokens' needs the token weights of embedder.kind = 'lexical', not {self.embedder.kind!r}. "
                "Use neighbors.rerank = 'embeddings'."
            )

    @property
    def run_settings(self) -> RunSettings:
        """The sections of a training run. Without `data.datastores` it reads `datastore`."""
        data = replace(self.data, datastores=self.data.datastores or (self.datastore,))
        return RunSettings(self.model, data, self.train, self.evaluation, self.parallel, self.tuning)
