"""Compare the recipes of a datastore's artifacts: which artifacts must exist, and which were made from others.

A recipe names the fingerprints of its inputs. They must be the fingerprints of the existing artifacts.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from indexing.corpus.scan import recipe_inputs
from indexing.store.artifact import fingerprint
from indexing.store.datastore import shard_name
from indexing.store.files import read_json

Manifests = Mapping[str, dict[str, Any]]


def stage_of(name: str) -> str:
    """The folder of an artifact: `chunks`, `dedup`, …"""
    return name.partition("/")[0]


def shard_of(name: str, stage: str) -> int | None:
    """The number of an artifact among the shards of this stage, or None if it is not one of them."""
    folder, _, shard = name.partition("/")
    return int(shard) if folder == stage and shard.isdigit() else None


def generations_of(manifests: Manifests) -> list[range]:
    """The shard numbers of the corpus and of appended generations, up to the first one that is unknown."""
    names = itertools.chain(["corpus"], (f"appended/{shard_name(number)}" for number in itertools.count(1)))
    starts = [0]
    for name in itertools.takewhile(manifests.__contains__, names):
        starts.append(starts[-1] + manifests[name]["counts"]["shards"])
    return [range(first, stop) for first, stop in itertools.pairwise(starts)]


def num_shards_of(manifests: Manifests) -> int:
    """Number of shards in these generations."""
    return sum(map(len, generations_of(manifests)))


def joint_fingerprint(manifests: Manifests, stage: str, generation: range | None = None) -> str | None:
    """The fingerprint of the shards of a stage, all or those of a generation; None if one is missing."""
    numbers = range(num_shards_of(manifests)) if generation is None else generation
    shards = [f"{stage}/{shard_name(shard)}" for shard in numbers]
    if not shards or any(shard not in manifests for shard in shards):
        return None
    return fingerprint([manifests[shard]["fingerprint"] for shard in shards])


def _searched(manifests: Manifests, number: int, settings: Mapping[str, Any]) -> str | None:
    """The fingerprint of everything that neighbors with these settings depend on in a generation."""
    generation = generations_of(manifests)[number]
    by_ngrams = settings.get("neighbors.search") == "ngrams"
    stages = ("chunks", "embeddings", "index", *["ngrams"] * by_ngrams)
    prints = {stage: joint_fingerprint(manifests, stage, generation) for stage in stages}
    if number == 0:
        prints["index"] = manifests["index/tuned"]["fingerprint"] if "index/tuned" in manifests else None
    return None if None in prints.values() else fingerprint(prints)


def _expected_inputs(name: str, manifests: Manifests) -> dict[str, str | None]:
    """The inputs that the recipe of an artifact must name, for inputs in the same datastore; None if unknown."""

    def print_of(other: str) -> str | None:
        return manifests[other]["fingerprint"] if other in manifests else None

    stage, _, shard = name.partition("/")
    generations = generations_of(manifests)
    first = generations[0] if generations else range(0)
    if name == "index/trained":
        return {"embeddings": joint_fingerprint(manifests, "embeddings", first)}
    if name == "index/merged":
        return {
            shard_name(number): print_of(f"index/{shard_name(number)}") for number in range(num_shards_of(manifests))
        }
    if name == "index/tuned":
        return {shard_name(number): print_of(f"index/{shard_name(number)}") for number in first}
    if stage == "neighbors":
        settings = manifests[name]["recipe"]["settings"]
        return {f"generation {number}": _searched(manifests, number, settings) for number in range(len(generations))}
    if stage == "ngrams":
        generation = next((each for each in generations if shard.isdigit() and int(shard) in each), None)
        return {"chunks": None if generation is None else joint_fingerprint(manifests, "chunks", generation)}
    if stage == "chunks":
        home = next((number for number, each in enumerate(generations) if shard.isdigit() and int(shard) in each), None)
        corpus = f"appended/{shard_name(home)}" if home else "corpus"
        dedup = {"dedup": print_of("dedup/removed")} if "dedup/removed" in manifests else {}
        known = None if home is None else print_of(corpus)
        return {"corpus": known, "tokenizer": print_of("tokenizer"), **dedup}
    if stage == "dedup" and name != "dedup/evaluation":
        made_from = {"corpus": "corpus", "tokenizer": "tokenizer", "evaluation": "dedup/evaluation"}
        return {key: print_of(made_from[key]) for key in manifests[name]["recipe"]["inputs"] if key in made_from}
    return {
        "tokenizer": {"corpus": print_of("corpus")},
        "embedder": {"chunks": joint_fingerprint(manifests, "chunks", first)},
        "embeddings": {"chunks": print_of(f"chunks/{shard}"), "embedder": print_of("embedder")},
        "sparse": {"chunks": print_of(f"chunks/{shard}")},
        "materialized": {"neighbors": print_of(f"neighbors/{shard}")},
        "index": {"trained": print_of("index/trained"), "embeddings": print_of(f"embeddings/{shard}")},
    }.get(stage, {})


def dedup_names(manifests: Manifests) -> set[str]:
    """The artifacts that `dedup/` must hold, because the chunks or the list of removed documents were made from them."""

    def made_from(name: str, stage: str) -> bool:
        return any(name in found["recipe"]["inputs"] for other, found in manifests.items() if stage_of(other) == stage)

    if not made_from("dedup", "chunks"):
        return set()
    signed = [shard_name(shard) for shard in range(num_shards_of(manifests))]
    names = {"dedup/removed"}
    if made_from("evaluation", "dedup"):
        names.add("dedup/evaluation")
        counts = manifests.get("dedup/evaluation", {}).get("counts", {})
        signed += [f"evaluation-{shard_name(shard)}" for shard in range(counts.get("shards", 0))]
    return names | {f"dedup/signatures/{shard}" for shard in signed}


def strange(folder: Path, name: str, known: Manifests, listed: int) -> Iterator[str]:
    """Yield the reasons why an artifact does not belong to the others.

    Args:
        folder: folder of the datastore.
        name: name of the artifact, one of `known`.
        known: the manifests of all artifacts that belong together.
        listed: number of shards in the datastore's manifest.
    """
    inputs, settings = (known[name]["recipe"][key] for key in ("inputs", "settings"))
    for key, expected in _expected_inputs(name, known).items():
        outside = key not in inputs and name in ("tokenizer", "embedder")  # `tokenizer.path`, `embedder.path`
        if not outside and expected is not None and inputs.get(key) != expected:
            yield f"was made from another '{key}' than the existing one"
    stage, shard = stage_of(name), name.rpartition("/")[2]
    held = settings.get("shard", shard)
    if (shard.isdigit() or stage == "dedup") and (shard_name(held) if isinstance(held, int) else held) != shard:
        yield f"holds shard {held}"
    in_stage = stage in ("chunks", "embeddings", "index", "sparse", "ngrams", "neighbors", "materialized")
    # If the shard is listed, the problem is a missing part of the corpus, not this artifact.
    if in_stage and shard.isdigit() and "corpus" in known and int(shard) >= max(num_shards_of(known), listed):
        yield "does not belong to this corpus"
    if name in ("corpus", "dedup/evaluation") or stage == "appended":
        files = [(file["name"], file["checksum"]) for file in read_json(folder / name / "files.json")]
        if inputs != recipe_inputs(files):
            yield "lists other files than its recipe"
