"""Compare the recipes of a datastore's artifacts: which artifacts must exist, and which were made from others.

A recipe names the fingerprints of its inputs. They must be the fingerprints of the existing artifacts.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from indexing.store.artifact import fingerprint
from indexing.store.datastore import shard_name

Manifests = Mapping[str, dict[str, Any]]

# Artifacts in the order in which they are made. Each is made from some of those before it.
_ORDER = ("corpus", "appended", "tokenizer", "dedup/evaluation", "dedup/signatures", "dedup/candidates", "dedup/grams", "dedup/removed", "chunks", "embedder", "embeddings", "index/trained", "index", "index/tuned", "sparse", "suffixes", "ngrams", "neighbors", "materialized", "index/merged", "votes")  # fmt: skip
ARTIFACTS = {
    "chunk": ("corpus", "tokenizer", "chunks/*"),
    "embed": ("embedder", "embeddings/*"),
    "train-index": ("index/trained",),
    "add": ("index/*", "index/tuned"),
    "sparse": ("sparse/*",),
    "ngrams": ("ngrams/*",),
    "neighbors": ("neighbors/*",),
    "materialize": ("materialized/*",),
    "merge": ("index/merged",),
    "suffixes": ("suffixes/*",),
    "votes": ("votes/*",),
}
"""The artifacts of each finished stage; `*` is every shard, or the first one of every group (`suffixes`)."""


TEMPORARY = ("ngrams/runs", "votes/ranges")
"""Folders that exist while a stage runs."""


def rank(name: str) -> int:
    """The position of an artifact in the order of making; names that are not artifacts come last."""
    kind = name if name in _ORDER else name.rpartition("/")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def generations_of(manifests: Manifests) -> dict[str, range]:
    """The shard numbers of `corpus` and of appended generations, up to the first one that is unknown."""
    names = itertools.chain(["corpus"], (f"appended/{shard_name(number)}" for number in itertools.count(1)))
    generations, start = dict[str, range](), 0
    for name in itertools.takewhile(manifests.__contains__, names):
        stop = start + manifests[name]["counts"]["shards"]
        generations[name], start = range(start, stop), stop
    return generations


def num_shards_of(manifests: Manifests) -> int:
    """Number of shards in these generations."""
    return sum(map(len, generations_of(manifests).values()))


def missing(manifests: Manifests, stages: Iterable[str], listed: int) -> set[str]:
    """The artifacts that must exist and are not in `manifests`.

    Args:
        manifests: the manifests of the existing artifacts.
        stages: finished stages in the datastore's manifest.
        listed: number of shards in the datastore's manifest; 0 if it cannot be read.
    """
    patterns = [pattern for stage in stages for pattern in ARTIFACTS.get(stage, ())]
    names = {name for pattern in patterns for name in _names(manifests, pattern, range(listed))}
    if (generations := generations_of(manifests)) and listed > num_shards_of(manifests):
        names.add(f"appended/{shard_name(len(generations))}")
    inputs = {stage: set[str]() for stage in ("chunks", "dedup")}
    for name, manifest in manifests.items():
        inputs.get(name.partition("/")[0], set()).update(manifest["recipe"]["inputs"])
    if "dedup" in inputs["chunks"]:
        signed = [shard_name(shard) for shard in range(num_shards_of(manifests))]
        names.add("dedup/removed")
        if "evaluation" in inputs["dedup"]:
            names.add("dedup/evaluation")
            counts = manifests.get("dedup/evaluation", {}).get("counts", {})
            signed += [f"evaluation-{shard_name(shard)}" for shard in range(counts.get("shards", 0))]
        names |= {f"dedup/signatures/{shard}" for shard in signed}
    return names - manifests.keys()


def stage_fingerprint(manifests: Manifests, stage: str) -> str | None:
    """The fingerprint of a finished stage in the datastore's manifest; None if it depends on an unknown artifact."""
    product = ARTIFACTS[stage][-1]
    if product.endswith("/*"):
        return _joint(manifests, product[:-2], range(num_shards_of(manifests)))
    first = len(generations_of(manifests).get("corpus", ()))
    appended = (
        [f"index/{shard_name(shard)}" for shard in range(first, num_shards_of(manifests))] if stage == "add" else []
    )
    if not appended:
        return _one(manifests, product)
    prints = [_one(manifests, name) for name in (product, *appended)]
    return None if None in prints else fingerprint(prints)


def _one(manifests: Manifests, name: str) -> str | None:
    return manifests[name]["fingerprint"] if name in manifests else None


def _names(manifests: Manifests, pattern: str, shards: range) -> list[str]:
    """The artifacts of a stage that hold these shards, all if there is no `*` in the pattern."""
    if "*" not in pattern:
        return [pattern]
    names, shard = list[str](), shards.start
    while shard < shards.stop:
        names.append(pattern.replace("*", shard_name(shard)))
        shard = _stop_of(manifests, names[-1])
    return names


def _stop_of(manifests: Manifests, name: str) -> int:
    """The shard after those of an artifact. Only `suffixes` hold several; an unknown one ends where the next known one begins."""
    folder, shard = name.split("/")
    if folder != "suffixes":
        return int(shard) + 1
    if name in manifests:
        return int(shard) + int(manifests[name]["recipe"]["settings"].get("shards", 1))
    known = (other.split("/") for other in manifests if other.startswith("suffixes/"))
    return min((int(start) for _, start in known if start > shard), default=sys.maxsize)


def _joint(manifests: Manifests, folder: str, shards: range) -> str | None:
    """One fingerprint over some shards of a stage; None if one is unknown."""
    prints = [_one(manifests, name) for name in _names(manifests, f"{folder}/*", shards)]
    return fingerprint(prints) if prints and None not in prints else None


def _input_fingerprint(name: str, key: str, manifests: Manifests) -> str | None:
    """The fingerprint that an artifact's recipe must give for this input; None if the input is unknown or no artifact."""
    shard, generations = name.rpartition("/")[2], generations_of(manifests)
    if key.startswith("generation "):  # of neighbors
        return _searched(manifests, int(key.split()[1]), manifests[name]["recipe"]["settings"])
    if name in ("embedder", "index/trained"):  # made from all shards of the first generation
        return _joint(manifests, key, generations.get("corpus", range(0)))
    if key == "chunks" and name.startswith("ngrams/"):  # made from all shards of a generation
        made_from = (shards for shards in generations.values() if shard.isdigit() and int(shard) in shards)
        return _joint(manifests, key, next(made_from, range(0)))
    if key == "chunks" and name.startswith("suffixes/"):
        return _joint(manifests, key, range(int(shard), _stop_of(manifests, name)))
    if key == "suffixes":  # votes are made from all shards
        return _joint(manifests, key, range(num_shards_of(manifests)))
    if key == "corpus" and name.startswith("chunks/"):
        homes = (corpus for corpus, shards in generations.items() if shard.isdigit() and int(shard) in shards)
        return _one(manifests, next(homes, ""))
    if key in ("chunks", "embeddings", "neighbors"):
        return _one(manifests, f"{key}/{shard}")
    others = {"dedup": "dedup/removed", "evaluation": "dedup/evaluation", "trained": "index/trained"}
    return _one(manifests, f"index/{key}" if key.isdigit() else others.get(key, key))


def _searched(manifests: Manifests, generation: int, settings: Mapping[str, Any]) -> str | None:
    """The fingerprint of everything that neighbors with these settings depend on in a generation; None if a part is unknown."""
    shards = next(itertools.islice(generations_of(manifests).values(), generation, None), range(0))
    by_ngrams = settings.get("neighbors.search") == "ngrams"
    stages = ("chunks", "embeddings", "index", *(["ngrams"] if by_ngrams else []))
    prints = {stage: _joint(manifests, stage, shards) for stage in stages}
    if generation == 0:
        prints["index"] = _one(manifests, "index/tuned")
    return None if None in prints.values() else fingerprint(prints)


def foreign(name: str, known: Manifests, listed: int) -> Iterator[str]:
    """Yield the reasons why an artifact does not belong to the others.

    Args:
        name: name of the artifact, one of `known`.
        known: the manifests of all artifacts that belong together.
        listed: number of shards in the datastore's manifest.
    """
    inputs, settings = (known[name]["recipe"][key] for key in ("inputs", "settings"))
    for key, recorded in inputs.items():
        if _input_fingerprint(name, key, known) not in (None, recorded):
            yield f"was made from another '{key}' than the existing one"
    stage, shard = name.partition("/")[0], name.rpartition("/")[2]
    held = settings.get("shard", shard)
    if (shard.isdigit() or stage == "dedup") and (shard_name(held) if isinstance(held, int) else held) != shard:
        yield f"holds shard {held}"
    in_stage = any(f"{stage}/*" in patterns for patterns in ARTIFACTS.values())
    # If the shard is listed, the problem is a missing part of the corpus, not this artifact.
    if in_stage and shard.isdigit() and "corpus" in known and int(shard) >= max(num_shards_of(known), listed):
        yield "does not belong to this corpus"
