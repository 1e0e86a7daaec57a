"""The votes of a datastore: what follows a text in other documents, by the length of the match.

For each token of a datastore they are stored in 8 to 9 bytes: records of 21 to 24 bytes, compressed in blocks.
`votes_build.py` makes them, models read them in training, and `search.py` finds the same for a text while it is
generated.
"""

from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from indexing.store.artifact import damaged, fingerprint, read_manifest, recorded
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.errors import InputError
from indexing.store.schemas import MOST_SHARDS
from indexing.suffixes.order import FOLDER as SUFFIXES
from indexing.suffixes.order import LONGEST

FOLDER = "votes"
VERSION = 5
"""Of the format. Votes of another version are made again."""
LENGTHS = (1, 2, 3, 4, 6, 10, 16)
"""Lengths of matches whose occurrences vote: the last tokens of a text, up to the longest match."""
SAMPLED = 32
"""At most this many occurrences of a match vote, spread evenly."""
KEPT = 3
"""Candidates: tokens whose votes are kept, the same for all lengths."""
SHARES = 15
"""Shares of votes are stored in fifteenths, rounded down."""
COLUMNS = 1 + KEPT + len(LENGTHS) * (1 + KEPT)
"""Numbers of `as_columns`."""
LARGEST_SIZE = 15
"""Size codes end at this one."""
LARGEST_VOCABULARY = 1 << 24
"""Token ids have at most three bytes."""


def vote_dtype(tokens: np.dtype) -> np.dtype:
    """The votes of one position, before they are compressed: 21 bytes with token ids of 16 bits, 24 bytes with larger
    ones.

    - `length` u1: of the longest match, at most 64; 0 = nothing votes at any length.
    - `tokens` [3]: the candidates, uint16, or three bytes each, the lowest first. From the longest length to the
      shortest, those with the most votes, then by id. 0 behind the last one.
    - `levels` u1 [7, 2]: for each of `LENGTHS` four numbers of 4 bits: in the first byte the size code (low) and the
      share of the first candidate (high), in the second byte the shares of the second (low) and third one (high).

    The size code is 0 if nothing votes, otherwise 1 + log2 of the occurrences that are followed by a token, rounded
    down, at most 15.
    """
    ids = ("tokens", "<u2", (KEPT,)) if tokens.itemsize == 2 else ("tokens", np.uint8, (KEPT, 3))
    return np.dtype([("length", np.uint8), ids, ("levels", np.uint8, (len(LENGTHS), 2))])


def deletions_of(datastore: Datastore) -> str:
    """A fingerprint of the deleted documents, which do not vote."""
    return fingerprint(datastore.train.deleted.tolist())


def has_votes(datastore: Datastore) -> bool:
    """Whether the stage `votes` is finished, of this version's format, and made after the last deletion."""
    if not datastore.has(FOLDER):
        return False
    return _version(datastore) == VERSION and _recorded(datastore)["deleted"] == deletions_of(datastore)


def all_vote(datastore: Datastore) -> bool:
    """Whether all documents vote for all tokens, and not only for those that were appended with them or later. The
    datastore has votes."""
    shards = len(datastore.train.chunk_rows)
    return all(_recorded(datastore, shard)["orders"][-1] == shards for shard in range(shards))


class _Recorded(TypedDict):
    """Settings in the recipe of a shard, see docs/reference/file-formats.md."""

    deleted: str
    orders: Annotated[list[Annotated[int, Field(ge=1, le=MOST_SHARDS)]], Field(min_length=1)]


def _recorded(datastore: Datastore, shard: int = 0) -> _Recorded:
    return recorded(datastore.folder / FOLDER / shard_name(shard), "settings", _Recorded)


def _version(datastore: Datastore) -> int:
    return int(read_manifest(datastore.folder / FOLDER / shard_name(0))["recipe"]["version"])


def require_votes(datastore: Datastore) -> None:
    """Raise InputError unless the datastore has votes, see `has_votes`."""
    if not datastore.has(FOLDER):
        raise InputError(
            f"{datastore.folder} has no finished '{FOLDER}' stage, which models read that copy from the whole datastore. Run "
            f"`retro index CONFIG` (or `--stage {SUFFIXES}`, then `--stage {FOLDER}`), or train with model.copy_head.datastore = false."
        )
    if _version(datastore) != VERSION:
        raise InputError(
            f"{datastore.folder / FOLDER} was made by an older version of the program, in another format. Run `retro index CONFIG --stage votes`."
        )
    if not has_votes(datastore):
        raise InputError(
            f"{datastore.folder}: documents were deleted since the stage 'votes' was made, and still vote. Run "
            "`retro index CONFIG --stage votes`."
        )


def stores_votes(datastore: Datastore) -> bool:
    """Whether votes are stored; if not, `suffixes` finds them.

    Raises:
        InputError: neither is possible, or the stored votes cannot be used (`require_votes`).
    """
    if not datastore.has(FOLDER) and datastore.has(SUFFIXES):
        return False
    require_votes(datastore)
    return True


def read_votes(split: Split, chunks: np.ndarray) -> np.ndarray:
    """The stored votes of chunks of a split.

    Args:
        split: the split.
        chunks: ids [n] int64.

    Returns:
        [n, m] of `vote_dtype`.

    Raises:
        InputError: a file is missing or damaged.
    """
    return split.votes.gather(chunks, vote_dtype(split.tokens.dtype), split.chunk_length)


def read_columns(split: Split, chunks: np.ndarray) -> np.ndarray:
    """The stored votes of chunks of a split, ids [n] int64, as numbers: [n, m, 32] int64, see `as_columns`.

    Raises:
        InputError: a file is missing or damaged.
    """
    votes = as_columns(read_votes(split, chunks))
    if (largest := int(votes[..., 1 : 1 + KEPT].max(initial=0))) >= split.vocab_size:  # a model has no logit for it
        folder = split.folder / FOLDER
        raise damaged(folder, f"{folder} names token {largest:,} of a vocabulary of {split.vocab_size:,}")
    return votes


def as_columns(votes: np.ndarray) -> np.ndarray:
    """Votes [...] as numbers [..., 32] int64.

    The length of the longest match, three candidates, then for each of `LENGTHS` the size code and the three shares (0
    to 15).
    """
    tokens, levels = votes["tokens"], votes["levels"]
    if tokens.ndim == votes.ndim + 2:
        tokens = tokens @ np.array([1, 1 << 8, 1 << 16])
    columns = np.empty((*votes.shape, COLUMNS), np.int64)
    columns[..., 0], columns[..., 1 : 1 + KEPT] = votes["length"], tokens
    pairs = levels.reshape(*votes.shape, -1)
    columns[..., 1 + KEPT :: 2], columns[..., 2 + KEPT :: 2] = pairs & 15, pairs >> 4
    return columns


def opaque(rows: np.ndarray) -> np.ndarray:
    """A view of rows [n] whose fields NumPy does not know: it moves those of `vote_dtype` four to seven times as fast."""
    return rows.view(f"V{rows.dtype.itemsize}")


def packed(lengths: np.ndarray, candidates: np.ndarray, numbers: np.ndarray, tokens: np.dtype) -> np.ndarray:
    """Votes [n] of `vote_dtype`.

    Args:
        lengths: of the longest matches, [n].
        candidates: [n, 3] int32, -1 = none.
        numbers: size code and shares, [n, 7, 4] uint8.
        tokens: type of token ids.
    """
    votes, ids = np.zeros(len(lengths), vote_dtype(tokens)), candidates.clip(0)
    votes["length"] = np.where(numbers[..., 0].any(axis=1), lengths, 0)
    votes["tokens"] = ids if tokens.itemsize == 2 else ids.astype("<u4")[..., None].view(np.uint8)[..., :3]
    votes["levels"] = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return votes


def within_limit(votes: np.ndarray, split: Split, max_overlap: float = 1.0) -> np.ndarray:
    """Remove, in place, the votes after matches that are longer than a part of a chunk.

    Only the text before a token counts. If the token itself counted too, all votes after the longest allowed match
    would be wrong ones: a right one makes the match longer.

    Args:
        votes: [..., 32], as `as_columns`.
        split: the split of the tokens; live votes: the searched one.
        max_overlap: longest match that votes, as a fraction of the chunk length. The limit of the stored neighbors
            (`neighbors.max_overlap`) also holds. 1 = no limit.
    """
    limit = min(max_overlap, split.neighbor_limit)
    if limit < 1:
        votes[votes[..., 0] > min(limit * split.chunk_length, LONGEST - 1)] = 0  # LONGEST stands for all longer matches
    return votes
