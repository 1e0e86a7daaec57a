"""Searches of sorted prefixes, in compiled loops over the files of a datastore; `search.py` opens these and asks.

    text ─ heads in memory ─► a few hundred adjacent rows ─ what distinguishes them (`rows.py`) ─► one row ─ its text ─► the longest match
    row ─ tokens shared with the rows around ─► for each length of match all its rows ─ at most 32 of them ─► the tokens that follow

A document of 8 tokens, `a b a c a b a d`, and the 4 of its 8 rows that end in `a`. `shared` are the tokens that a row
has in common with the row before, `next` is the token of the row behind these:

    row  prefix, backwards  position  follows  shared  next
    0    a                  0         b        0       a
    1    a b a              2         c        1       b
    2    a b a c a b a      6         d        3       c
    3    a c a b a          4         b        1       c

A search for `x b a`, backwards `a b x`:

1. `_rows_near`: the stored heads lead to these rows.
2. `deepest` begins with row 0. Row 1 differs from it in the token at place 1. This is `b`, as in the text, so row 1 is
   followed. Row 2 differs at place 3, behind the end of the text. Row 3 differs at place 1 too, but with `c`. So row 1
   is the result.
3. `_longest_in` reads the text of row 1 alone: it shares `a b` with `a b x`. The match has 2 tokens.
4. `around` row 1: row 2 shares 3 tokens with the row before, row 3 shares 1. So `b a` is in rows 1 and 2, and `a` is in
   rows 0 to 3.
5. `find_votes`: after `b a` come c and d, and after `a` come b, c, d and b.

All loops are in one file: numba keeps the result of a function until the file of that function changes. It does not
notice a change of a function that is called from there and is in another file.

A row is a prefix: its place in an order. A position is that of a token in a split (`texts.py`). A text is an int64
array of token ids, backwards, and its size. A part, an order and a shard are numbers of rows of `Files`.
"""

import mmap
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from indexing.machine import compiled
from indexing.suffixes.rows import FAN_OUT, LONGEST_SHARED, TOKEN_BITS, TOKEN_MASK
from indexing.suffixes.votes import COLUMNS, KEPT, LARGEST_SIZE, LENGTHS, SAMPLED, SHARES

# Python's integers would be constants to the compiler, which compiles a function again for each.
_ALL_SHARED, _MOST, _NONE, _ONE = np.int64(LONGEST_SHARED), np.int64(SAMPLED), np.int64(0), np.int64(1)
_EVERY_ROW = np.int64(1) << np.int64(48)  # more rows than an order has
_DOCUMENT_BITS = np.int64(40)
_DOCUMENT = (np.int64(1) << _DOCUMENT_BITS) - np.int64(1)
SHARD_COLUMNS, PART_COLUMNS = 5, 8
_SHARD_COLUMNS, _PART_COLUMNS = np.int64(SHARD_COLUMNS), np.int64(PART_COLUMNS)
_FIRST, _TOKENS, _LENGTHS, _OFFSETS, _DOCUMENTS = map(np.int64, range(SHARD_COLUMNS))
_FIRST_ROW, _NUM_ROWS, _ROWS, _ALL_ROWS, _POSITIONS, _HEADS, _NUM_HEADS, _POSITION_BYTES = map(
    np.int64, range(PART_COLUMNS)
)


_MADVISE = types.ExternalFunction("madvise", types.intc(types.uintp, types.uintp, types.intc))
_WILL_NEED, _PAGE = np.int32(mmap.MADV_WILLNEED), np.int64(mmap.PAGESIZE)
_DRAWN_FROM = np.int64(SAMPLED * FAN_OUT)  # of more rows, those of a higher level are read


class NotOpen(Exception):
    """The text of a shard is needed that is not open yet. Its argument is the shard; the number of shards for a
    position behind all texts."""


class DamagedRows(Exception):
    """`rows.npy` of a part has content that no build writes. `Files.damaged` is the part: an exception with an argument
    makes its loop slower."""


class DamagedText(Exception):
    """A text of a shard has content that no build writes. `Files.damaged` is the shard."""


class Files(NamedTuple):
    """Memory-mapped files by their addresses, since a loop reads from any number of them. They must stay mapped, and
    the tables must stay.

    The loops read inside of the mapped files whatever these contain, if their types and numbers of rows are those that
    the tables say.

    Attributes:
        shards: address of a table [shards + 1, 5] int64: the first position, addresses of tokens, lengths of chunks and
            document offsets, number of documents; an address of 0: not open. Of the last row only the position behind
            all.
        parts: address of a table [parts, 8] int64: the first row in its order, number of rows, address of `rows.npy`
            and its number of rows, addresses of `positions.npy` and `heads.npy`, number of heads, bytes of a position.
            Parts of an order are consecutive.
        first_heads: address of a table [parts] uint64: the first head of each part.
        orders: address of a table [orders + 1] int64: the first part of each order.
        num_shards: number of shards.
        num_parts: number of parts.
        num_orders: number of orders.
        chunk_length: m.
        vocabulary: token ids are below this number.
        token_bytes: of a stored token id.
        columns: of `rows.npy`.
        head_tokens: tokens of a head.
        rows_of_head: rows from one stored head to the next.
        adjacent: among this many rows the one that shares most with a text is found without reading other texts.
        looked_at: if some of many occurrences are wanted, whether they are deleted is read at this many times as many,
            spread evenly.
        damaged: address of an int64, which is written before `DamagedRows` or `DamagedText` is raised.
    """

    shards: int
    parts: int
    first_heads: int
    orders: int
    num_shards: int
    num_parts: int
    num_orders: int
    chunk_length: int
    vocabulary: int
    token_bytes: int
    columns: int
    head_tokens: int
    rows_of_head: int
    adjacent: int
    looked_at: int
    damaged: int


# --- search -------------------------------------------------------------------------------------------------------


@compiled
def find_match(text: np.ndarray, size: int, deleted: np.ndarray, files: Files) -> tuple[int, np.ndarray, np.ndarray]:
    """The longest match of a text of at most 64 tokens outside of deleted ranges of chunks [n, 2].

    Args:
        text: [64], the others are not read.
        size: its tokens, at least one.
        deleted: sorted and disjoint.
        files: the files.

    Returns:
        its length, the longest one in each order [orders], and a row of each order that shares as much [orders].
    """
    orders = files.num_orders
    longest, lengths, rows = 0, np.zeros(orders, np.int64), np.zeros(orders, np.int64)
    for order in range(orders):
        length, rows[order] = _longest(text, size, order, files)
        if length and len(deleted):  # those nearest to such a row share as many as any that is left
            length, _ = _longest_living(text, size, rows[order], order, deleted, files)
        lengths[order], longest = length, max(longest, length)
    return longest, lengths, rows


@compiled
def _longest(text: np.ndarray, size: int, order: int, files: Files) -> tuple[int, int]:
    """Length of the longest match of a text in an order, and a row that shares these tokens."""
    best, best_row = 0, 0
    first, stop = _rows_near(text, size, order, files)
    part = _part_of(first, order, files)
    while part < _first_part(order + 1, files) and _of_part(part, _FIRST_ROW, files) < stop:
        begin = _of_part(part, _FIRST_ROW, files)
        end = begin + _of_part(part, _NUM_ROWS, files)
        length, row = _longest_in(part, max(first, begin), min(stop, end), text, size, files)
        if length > best or (length == best and row > best_row):
            best, best_row = length, row
        part += 1
    return best, best_row


@compiled
def _rows_near(text: np.ndarray, size: int, order: int, files: Files) -> tuple[int, int]:
    """A few hundred rows [first, stop) of an order at most. One of them shares most last tokens with the text."""
    head = _head(text, size, files)
    first, last = _row_before(head, order, files), min(_rows_of(order, files) - 1, _row_after(head, order, files))
    while last - first > files.adjacent:  # more rows than these have the same head
        middle = (first + last) // 2
        if _is_smaller(_position(middle, order, files), text, size, files):
            first = middle
        else:
            last = middle
    return first, last + 1


@compiled
def _longest_in(part: int, first: int, stop: int, text: np.ndarray, size: int, files: Files) -> tuple[int, int]:
    """Length of the longest match of a text in the rows [first, stop) of a part, and a row of it."""
    start = _of_part(part, _FIRST_ROW, files)
    near, followed = deepest(part, first - start, stop - start, text, size, files)
    row = start + near
    length = _shared(_position_in(part, near, files), text, size, files)
    if length < LONGEST_SHARED and not followed >> length & 1:
        return length, row
    if length >= LONGEST_SHARED:
        first, stop, _ = around(part, near, _ALL_SHARED, _EVERY_ROW, files)
        first, stop = first + start, stop + start
    low, high = first, stop  # the first row that is not smaller than the text
    while low < high:
        middle = (low + high) // 2
        if _is_smaller(_position_in(part, middle - start, files), text, size, files):
            low = middle + 1
        else:
            high = middle
    length, row = 0, first
    for at in (low - 1, low):
        if first <= at < stop:
            shared = _shared(_position_in(part, at - start, files), text, size, files)
            if shared >= length:
                length, row = shared, at
    return length, row


@compiled
def _longest_living(
    text: np.ndarray, size: int, row: int, order: int, deleted: np.ndarray, files: Files
) -> tuple[int, int]:
    """Find a row that is not deleted and shares as many last tokens with a text as any of them.

    Returns:
        the number of these tokens, and the row; 0 and -1 if all rows are deleted. It is one of two: the nearest such
        row before `row`, and the nearest one from `row` on.
    """
    length, best = 0, -1
    for step in (-1, 1):
        at = row if step == 1 else row - 1
        while 0 <= at < _rows_of(order, files):
            position = _position(at, order, files)
            if _is_living(position, deleted, files):
                shared = _shared(position, text, size, files)
                if best < 0 or shared > length:
                    length, best = shared, at
                break
            at += step
    return length, best


@compiled
def match_rows(text: np.ndarray, length: int, lengths: np.ndarray, rows: np.ndarray, files: Files) -> np.ndarray:
    """The rows [first, stop) of each order, [orders, 2], whose last tokens are those of a text.

    Args:
        text: the text.
        length: how many last tokens.
        lengths: of the longest matches, see `find_match`.
        rows: that share as much.
        files: the files.
    """
    return _match_rows(text, length, lengths, rows, _EVERY_ROW, files)[0]


@compiled
def _match_rows(
    text: np.ndarray, length: int, lengths: np.ndarray, rows: np.ndarray, most: int, files: Files
) -> tuple[np.ndarray, int]:
    """`match_rows`, as exactly as drawing `most` rows needs, and how many rows more there can be, see `around`."""
    ranges, loose = np.zeros((len(rows), 2), np.int64), 0
    for order in range(len(rows)):
        if length <= lengths[order]:
            ranges[order, 0], ranges[order, 1], more = _rows_around(text, length, rows[order], order, most, files)
            loose += more
    return ranges, loose


@compiled
def _rows_around(text: np.ndarray, size: int, row: int, order: int, most: int, files: Files) -> tuple[int, int, int]:
    """The rows [first, stop) of the prefixes of an order that end in a text, as one row does, and how many more there
    can be, see `around`."""
    part = _part_of(row, order, files)
    start = _of_part(part, _FIRST_ROW, files)
    if size > LONGEST_SHARED:
        first, stop, _ = around(part, row - start, _ALL_SHARED, _EVERY_ROW, files)
        first = _first_row(True, text, size, first + start, row, order, files)
        return first, _first_row(False, text, size, row, stop + start, order, files), 0
    first, stop, loose = around(part, row - start, size, most, files)
    first, stop = first + start, stop + start
    if files.num_parts == 1:
        return first, stop, loose
    return _in_all_parts(text, size, first, stop, loose, order, most, files)


@compiled
def _first_row(ends: bool, text: np.ndarray, size: int, low: int, high: int, order: int, files: Files) -> int:
    """The first of the rows [low, high) that ends in a text; without `ends`, the first one that does not. `high` if
    there is none.

    All rows behind it are alike.
    """
    while low < high:
        middle = (low + high) // 2
        if (_shared(_position(middle, order, files), text, size, files) == size) == ends:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _in_all_parts(
    text: np.ndarray, size: int, first: int, stop: int, loose: int, order: int, most: int, files: Files
) -> tuple[int, int, int]:
    """The rows of all parts around those of one part that end in a text. Parts have different heads, so only texts that
    are shorter than a head are in several, and the head of a row says whether it ends in such a text."""
    rows = _rows_of(order, files)
    if size >= files.head_tokens:
        return first, stop, loose
    while first > 0:
        part = _part_of(first, order, files)
        if _of_part(part, _FIRST_ROW, files) != first or not _part_ends_in(part - 1, text, size, files):
            break
        last = _of_part(part - 1, _NUM_ROWS, files) - 1
        begin, _, more = around(part - 1, last, size, most, files)
        first, loose = _of_part(part - 1, _FIRST_ROW, files) + begin, loose + more
    while stop < rows:
        part = _part_of(stop, order, files)
        if _of_part(part, _FIRST_ROW, files) != stop or not _head_ends_in(part, _NONE, text, size, files):
            break
        _, end, more = around(part, _NONE, size, most, files)
        stop, loose = stop + end, loose + more
    return first, stop, loose


@compiled
def _part_ends_in(part: int, text: np.ndarray, size: int, files: Files) -> bool:
    """Whether the last row of a part ends in a text that the row behind it ends in."""
    if _head_ends_in(part, _of_part(part, _NUM_HEADS, files) - 1, text, size, files):
        return True  # all rows behind this one do
    return _shared(_position_in(part, _of_part(part, _NUM_ROWS, files) - 1, files), text, size, files) == size


@compiled
def _head_ends_in(part: int, number: int, text: np.ndarray, size: int, files: Files) -> bool:
    """Whether the row of a stored head ends in a text that is shorter than a head."""
    stored = _uint64(_of_part(part, _HEADS, files))[number]
    unread = np.uint64((files.head_tokens - size) * (64 // files.head_tokens))
    return (stored ^ _head(text, size, files)) >> unread == 0


# --- occurrences of many texts --------------------------------------------------------------------------------------


@compiled
def find_occurrences(
    window: np.ndarray,
    texts: np.ndarray,
    deleted: np.ndarray,
    bounds: np.ndarray,
    shared: np.ndarray,
    following: np.ndarray,
    files: Files,
) -> None:
    """Fill in where the ends of texts occur in each order, see `votes_build.Occurrences`.

    Args:
        window: the last tokens of texts, each plus 1, 0 before one begins, [n, 64].
        texts: the numbers [t] of those that are searched.
        deleted: as for `find_match`.
        bounds: [orders, 7, 2, n] int64.
        shared: [orders, n] int64.
        following: [orders, n] int64.
        files: the files.
    """
    text = np.empty(window.shape[1], np.int64)
    for number in texts:
        size = 0
        while size < len(text) and window[number, size]:
            text[size] = np.int64(window[number, size]) - 1
            size += 1
        _, lengths, rows = find_match(text, size, deleted, files)
        for order in range(files.num_orders):
            shared[order, number], row = lengths[order], rows[order]
            if lengths[order] and len(deleted):
                _, row = _longest_living(text, size, row, order, deleted, files)
            if lengths[order]:
                following[order, number] = _following_row(row, order, _ONE, files)
            for level in range(len(LENGTHS)):
                if LENGTHS[level] <= lengths[order]:
                    first, stop, _ = _rows_around(text, LENGTHS[level], rows[order], order, _EVERY_ROW, files)
                    bounds[order, level, 0, number], bounds[order, level, 1, number] = first, stop


# --- votes --------------------------------------------------------------------------------------------------------


@compiled
def find_votes(texts: np.ndarray, sizes: np.ndarray, deleted: np.ndarray, files: Files) -> np.ndarray:
    """What follows the matches of some texts, by the length of the match: [n, 32] int64, as `votes.as_columns`.

    Args:
        texts: [n, 64].
        sizes: at least one token each, [n].
        deleted: as for `find_match`.
        files: the files.
    """
    votes = np.zeros((len(texts), COLUMNS), np.int64)
    candidates, numbers = np.empty(KEPT, np.int32), np.empty(1 + KEPT, np.uint8)
    for number in range(len(texts)):
        text = texts[number]
        length, of_order, rows = find_match(text, sizes[number], deleted, files)
        longer, any_votes = np.zeros((len(rows), 2), np.int64), False
        candidates[:] = -1
        for level in range(len(LENGTHS) - 1, -1, -1):
            if LENGTHS[level] > length:
                continue
            # Long ranges are drawn from without their ends, unless that decides the step or the stored number.
            most = _EVERY_ROW if len(deleted) else _MOST
            while True:
                ranges, loose = _match_rows(text, LENGTHS[level], of_order, rows, most, files)
                if _same(ranges, longer):
                    break  # the votes are those of the longer match
                occurrences, following, counted, drawn, step = _drawn(ranges, deleted, files)
                least = occurrences * counted // max(1, drawn)
                largest = (occurrences + loose) * counted // max(1, drawn)
                if loose and (_size_code(least) != _size_code(largest) or step != _stride(occurrences + loose, _MOST)):
                    most = _EVERY_ROW
                    continue
                numbers[:] = 0
                elect(following, counted, least, candidates, numbers)
                break
            for at in range(1 + KEPT):
                votes[number, (1 + level) * (1 + KEPT) + at] = numbers[at]
            any_votes, longer = any_votes or numbers[0] > 0, ranges
        if any_votes:
            votes[number, 0] = length
            for place in range(KEPT):
                votes[number, 1 + place] = max(0, candidates[place])
        else:
            votes[number] = 0
    return votes


@compiled
def _drawn(ranges: np.ndarray, deleted: np.ndarray, files: Files) -> tuple[int, np.ndarray, int, int, int]:
    """Draw at most 32 of the rows in some ranges, outside of deleted ranges of chunks.

    Returns:
        how many such rows there are; the tokens that follow the drawn ones, in order of ids, and how many of these
        there are; how many rows were drawn; and the step of their level.
    """
    occurrences, orders, rows, step = some_ends(ranges, _MOST, deleted, files)
    following, counted = np.empty(len(rows), np.int32), 0
    for at in range(len(rows)):
        token = _following_row(rows[at], orders[at], step, files)
        if token >= 0:
            counted = _insert(following, counted, token)
    return occurrences, following, counted, len(rows), step


@compiled
def take_votes(
    starts: np.ndarray,
    least: int,
    length: np.ndarray,
    bounds: np.ndarray,
    longer_bounds: np.ndarray,
    groups: np.ndarray,
    level: int,
    numbers: np.ndarray,
    pending: np.ndarray,
) -> np.ndarray:
    """Take the votes of a match from the next longer match of the same row, if both have the same voters.

    Args:
        starts: rows that end in the same `least` tokens are a group: the first row of each, and the end of all,
            [groups + 1].
        least: tokens of the match.
        length: tokens of each row's longest match, [n].
        bounds: of the voters of each group, [bounds, groups].
        longer_bounds: the same of the next longer match, [bounds, its groups].
        groups: the group of each row there, [n], -1 = none; becomes the one here.
        level: number of the match.
        numbers: [n, 7, 4] uint8, the votes.
        pending: [n] bool, becomes whether the votes have to be counted.

    Returns:
        the groups with votes to count.
    """
    found, count = np.empty(len(starts) - 1, np.int64), 0
    for group in range(len(starts) - 1):
        is_new = False
        for row in range(starts[group], starts[group + 1]):
            longer, groups[row], pending[row] = groups[row], -1, False
            if length[row] < least:
                continue
            groups[row], same = group, longer >= 0
            for bound in range(len(bounds)):
                same = same and bounds[bound, group] == longer_bounds[bound, longer]
            if same:
                for place in range(1 + KEPT):
                    numbers[row, level, place] = numbers[row, level + 1, place]
            else:
                pending[row] = is_new = True
        if is_new:
            found[count] = group
            count += 1
    return found[:count]


@compiled
def count_votes(
    begins: np.ndarray,
    ends: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    size: np.ndarray,
    before: int,
    documents: np.ndarray,
    following: np.ndarray,
    own: np.ndarray,
    nearest: np.ndarray,
    pending: np.ndarray,
    candidates: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """Count the votes of matches of groups of rows, which have the same voters. Longer matches come first.

    Args:
        begins: first row of each group, [n].
        ends: the one after its last.
        low: first voter of each group, [n]. At most 32 voters are counted, spread evenly, as a search reads them
            (`rows.stride`).
        high: the one after the last voter.
        size: the number of voters.
        before: voters before all of these.
        documents: of the voters in order, int64.
        following: the tokens after the voters, int32; -1 = none.
        own: document of every row of the range.
        nearest: the token that follows the nearest prefix of another document, of every row, int32.
        pending: whether the votes of a row are counted, of every row.
        candidates: of every row, [all, 3] int32, -1 = none; those of the counted rows are completed.
        numbers: of every row, [all, 4] uint8, receives size code and shares.
    """
    voters, found = np.empty(SAMPLED, np.int64), np.empty(SAMPLED, np.int32)
    for group in range(len(begins)):
        drawn, kept = _draw(low[group], high[group], before, documents, following, voters)
        for row in range(begins[group], ends[group]):
            if not pending[row]:
                continue
            counted = 0
            for number in range(kept):
                if voters[number] & _DOCUMENT != own[row]:
                    found[counted] = voters[number] >> _DOCUMENT_BITS
                    counted += 1
            total = size[group] * counted // max(1, drawn)
            if counted == 0 and nearest[row] >= 0:  # most occurrences are in the own document
                found[0] = nearest[row]
                counted = total = 1
            elect(found, counted, total, candidates[row], numbers[row])


@compiled
def _draw(
    low: int, high: int, before: int, documents: np.ndarray, following: np.ndarray, voters: np.ndarray
) -> tuple[int, int]:
    """Draw the voters of a match that are counted, see `count_votes`.

    Args:
        low: first voter.
        high: the one after the last.
        before: as there.
        documents: as there.
        following: as there.
        voters: [32] int64, receives the token after each voter and, in the lower 40 bits, its document, in order of
            tokens.

    Returns:
        how many were drawn, and how many of these are followed by a token.
    """
    step, kept = _stride(high - low, _MOST), 0
    begin = -(-(low + before) // step)
    there = -(-(high + before) // step) - begin
    drawn = min(SAMPLED, there)
    for number in range(drawn):
        voter = (begin + number * there // drawn) * step - before
        if following[voter] >= 0:
            kept = _insert(voters, kept, np.int64(following[voter]) << _DOCUMENT_BITS | documents[voter])
    return drawn, kept


@compiled
def _insert(found: np.ndarray, count: int, token: int) -> int:
    """Insert a token into `count` tokens in order of ids; return how many there are then."""
    place = count
    while place > 0 and found[place - 1] > token:
        found[place] = found[place - 1]
        place -= 1
    found[place] = token
    return count + 1


@compiled
def elect(found: np.ndarray, counted: int, total: int, candidates: np.ndarray, numbers: np.ndarray) -> None:
    """Complete the candidates of a text, and write the votes of one match.

    Args:
        found: the tokens that follow it, in order of ids.
        counted: how many.
        total: how often it occurs.
        candidates: of longer matches, [3] int32, -1 = none.
        numbers: [4] uint8, zeros; receives size code and shares.
    """
    filled = 0
    while filled < KEPT and candidates[filled] >= 0:
        filled += 1
    while filled < KEPT:
        best, most, first = np.int32(-1), 0, 0
        while first < counted:  # of equally frequent ones the smallest id
            stop, known = first, False
            while stop < counted and found[stop] == found[first]:
                stop += 1
            for place in range(filled):
                known = known or candidates[place] == found[first]
            if not known and stop - first > most:
                best, most = found[first], stop - first
            first = stop
        if best < 0:
            break
        candidates[filled] = best
        filled += 1
    numbers[0] = _size_code(total)
    for place in range(filled):
        votes = 0
        for at in range(counted):
            votes += found[at] == candidates[place]
        numbers[1 + place] = SHARES * votes // max(1, counted)


@compiled
def _size_code(total: int) -> int:
    """A number of votes as it is stored: 1 + log2, rounded down, and 0 for 0."""
    code = 0
    while total > 0 and code < LARGEST_SIZE:
        code, total = code + 1, total >> 1
    return code


# --- occurrences --------------------------------------------------------------------------------------------------


@compiled
def _same(ranges: np.ndarray, others: np.ndarray) -> bool:
    for order in range(len(ranges)):
        if ranges[order, 0] != others[order, 0] or ranges[order, 1] != others[order, 1]:
            return False
    return True


@compiled
def some_ends(
    ranges: np.ndarray, most: int, deleted: np.ndarray, files: Files
) -> tuple[int, np.ndarray, np.ndarray, int]:
    """At most `most` of the rows in some ranges, outside of deleted ranges of chunks, spread evenly.

    Args:
        ranges: rows [first, stop) of each order, [orders, 2].
        most: if there are more and some are deleted, the number of all is estimated.
        deleted: as for `find_match`.
        files: the files.

    Returns:
        - how many such rows there are,
        - the order of each returned row, [n],
        - the returned rows, [n],
        - the step between rows of the level that they are in: a power of 32, see `rows.stride`.
    """
    total = 0
    for order in range(len(ranges)):
        total += ranges[order, 1] - ranges[order, 0]
    if not len(deleted) or not total:
        step = _stride(total, most)
        orders, rows = _spread(ranges, most, step, files)
        return total, orders, rows, step
    looked_at = total if most >= total // files.looked_at else files.looked_at * most
    while True:
        step = _stride(total, looked_at)
        orders, rows = _spread(ranges, looked_at, step, files)
        left, count = np.empty(len(rows), np.int64), 0
        for at in range(len(rows)):
            if _is_living(_position(rows[at], orders[at], files), deleted, files):
                left[count] = at
                count += 1
        if count >= most or looked_at == total:
            break
        looked_at = total  # too few of those are left
    chosen = min(count, most)
    some_orders, some_rows = np.empty(chosen, np.int64), np.empty(chosen, np.int64)
    for number in range(chosen):
        at = left[_place(number, count, chosen)]
        some_orders[number], some_rows[number] = orders[at], rows[at]
    return count if len(rows) == total else total * count // len(rows), some_orders, some_rows, step


@compiled
def _spread(ranges: np.ndarray, most: int, step: int, files: Files) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` of the rows in some ranges that are multiples of a step, counted from the first row of each part,
    spread evenly.

    Returns:
        orders [n] and rows [n].
    """
    pieces = 0
    for order in range(len(ranges)):
        if ranges[order, 0] < ranges[order, 1]:
            pieces += _part_of(ranges[order, 1] - 1, order, files) - _part_of(ranges[order, 0], order, files) + 1
    firsts, stops = np.empty(pieces, np.int64), np.empty(pieces, np.int64)  # numbers of rows
    begins, in_orders, piece, there = np.empty(pieces, np.int64), np.empty(pieces, np.int64), 0, 0
    for order in range(len(ranges)):
        first, stop = ranges[order, 0], ranges[order, 1]
        part = _part_of(first, order, files) if first < stop else _first_part(order + 1, files)
        while part < _first_part(order + 1, files) and _of_part(part, _FIRST_ROW, files) < stop:
            start = _of_part(part, _FIRST_ROW, files)
            begin = max(first, start)
            begin += (start - begin) % step
            firsts[piece], begins[piece], in_orders[piece] = there, begin, order
            there += max(0, -(-(min(stop, start + _of_part(part, _NUM_ROWS, files)) - begin) // step))
            stops[piece] = there
            part, piece = part + 1, piece + 1
    count, piece = min(there, most), 0
    orders, rows = np.empty(count, np.int64), np.empty(count, np.int64)
    for number in range(count):
        place = _place(number, there, count)
        while place >= stops[piece]:
            piece += 1
        orders[number], rows[number] = in_orders[piece], begins[piece] + step * (place - firsts[piece])
    return orders, rows


@compiled
def _place(number: int, count: int, chosen: int) -> int:
    """The place of one of `chosen` elements among `count`, see `rows.spread`."""
    return number if chosen == count else number * count // chosen


@compiled
def _stride(count: int, most: int) -> int:
    """`rows.stride`."""
    step = 1
    while step <= count // (FAN_OUT * most):
        step *= FAN_OUT
    return step


@compiled
def following_rows(orders: np.ndarray, rows: np.ndarray, step: int, files: Files) -> np.ndarray:
    """The tokens that follow rows of orders, which are multiples of a power of 32: [n] int64; -1 = none."""
    tokens = np.empty(len(rows), np.int64)
    for at in range(len(rows)):
        tokens[at] = _following_row(rows[at], orders[at], step, files)
    return tokens


@compiled
def positions_of(orders: np.ndarray, rows: np.ndarray, files: Files) -> np.ndarray:
    """The positions of rows of orders: [n] int64."""
    positions = np.empty(len(rows), np.int64)
    for at in range(len(rows)):
        positions[at] = _position(rows[at], orders[at], files)
    return positions


# --- rows ---------------------------------------------------------------------------------------------------------


@compiled
def around(part: int, row: int, size: int, most: int, files: Files) -> tuple[int, int, int]:
    """The rows of a part that share their last tokens, `size` of them and at most 31, with a row, all counted from its
    first one. A range from which rows are only drawn is long enough without its ends, so these are not read.

    A row of a higher level has the fewest tokens that are shared from its predecessor there on. From the row, levels
    are climbed until the next row is outside; then the ends are searched downwards.

    Args:
        part: the part.
        row: of it.
        size: number of tokens.
        most: rows that are drawn; `_EVERY_ROW`: the range is exact.
        files: the files.

    Returns:
        rows [first, stop), and how many more the range can have. All rows of the level that is drawn from
        (`rows.stride`) are on their side of both ends.
    """
    starts, num_rows = _level_starts(_of_part(part, _NUM_ROWS, files)), _of_part(part, _NUM_ROWS, files)
    below, first = _climb_back(part, row, size, starts, files)  # levels, and rows of them
    above, stop = _climb_on(part, row + 1, size, starts, files)
    while True:
        begin, end = first * FAN_OUT**below, (stop - 1) * FAN_OUT**above + 1
        step, is_last = _stride(end - begin, most), stop * FAN_OUT**above >= num_rows  # may go on in the next part
        if FAN_OUT**below > step:
            below, first = below - 1, _back(part, first * FAN_OUT, below - 1, size, starts, files)
        elif FAN_OUT**above > step or (above > 0 and is_last):
            above, stop = above - 1, _on(part, (stop - 1) * FAN_OUT + 1, above - 1, size, starts, files)
        else:
            return begin, end, FAN_OUT**below + FAN_OUT**above - 2


@compiled
def _climb_back(part: int, first: int, size: int, starts: np.ndarray, files: Files) -> tuple[int, int]:
    """Go back from a row to a row of a level before which the next row of that level is outside, as high as possible:
    the level, and the row there."""
    level = 0
    while True:
        if (
            level + 2 < len(starts)
            and first % FAN_OUT == 0
            and _shares(part, level + 1, first // FAN_OUT, size, starts, files)
        ):
            level, first = level + 1, first // FAN_OUT
        elif _shares(part, level, first, size, starts, files):
            first = _before(part, first, files)
        else:
            return level, first


@compiled
def _climb_on(part: int, stop: int, size: int, starts: np.ndarray, files: Files) -> tuple[int, int]:
    """The same forward, from the row before `stop`: the level, and the row behind the last one of that level that is
    inside."""
    level = 0
    while True:
        higher = (stop - 1) // FAN_OUT + 1
        if (
            level + 2 < len(starts)
            and (stop - 1) % FAN_OUT == 0
            and _shares(part, level + 1, higher, size, starts, files)
        ):
            level, stop = level + 1, higher
        elif _shares(part, level, stop, size, starts, files):
            stop += 1
        else:
            return level, stop


@compiled
def _back(part: int, first: int, level: int, size: int, starts: np.ndarray, files: Files) -> int:
    """The first row of a level that is inside, from one that is."""
    while _shares(part, level, first, size, starts, files):
        first = _before(part, first, files)
    return first


@compiled
def _on(part: int, stop: int, level: int, size: int, starts: np.ndarray, files: Files) -> int:
    """The row behind the last row of a level that is inside, from one that is behind such a row."""
    while _shares(part, level, stop, size, starts, files):
        stop += 1
    return stop


@compiled
def _shares(part: int, level: int, row: int, size: int, starts: np.ndarray, files: Files) -> bool:
    """Whether a row of a level shares at least `size` tokens with the row before it. Behind the last row: False."""
    at = starts[level] + row
    return at < starts[level + 1] and _table(part, files)[at, -1] >> TOKEN_BITS >= size


@compiled
def _before(part: int, row: int, files: Files) -> int:
    """The row before a row that shares tokens with one before it."""
    if row == 0:
        _int64(files.damaged)[0] = part
        raise DamagedRows
    return row - 1


@compiled
def deepest(part: int, first: int, stop: int, text: np.ndarray, size: int, files: Files) -> tuple[int, int]:
    """Find the row of a part in [first, stop) that shares most last tokens with a text by 11 bits of each token that
    distinguishes rows.

    The rows are the leaves of a tree, from left to right. The first row below a node is followed until a later one has
    the text's token.

    Returns:
        the row, and a number in which bit n is set if the search followed token n. If the row and the text share
        exactly n tokens and this bit is set, two tokens have the same 11 bits, and another row may share more. Rows
        that share at least 31 tokens count as equal.
    """
    table, compared = _table(part, files), min(size, LONGEST_SHARED)
    best, best_followed, followed, skipped = first, 0, 0, LONGEST_SHARED
    _read_ahead(part, first, stop, files)
    for row in range(first + 1, stop):
        stored: Any = np.int64(table[row, -1])
        depth = stored >> TOKEN_BITS
        if depth > skipped or depth >= LONGEST_SHARED:
            continue  # below a node that was not followed
        skipped = depth
        followed &= (2 << depth) - 1  # of this node and those above
        token = (text[depth] + 1) & TOKEN_MASK if depth < compared else -1
        if token == stored & TOKEN_MASK and not followed >> depth & 1:
            followed |= 1 << depth
            best, best_followed, skipped = row, followed, LONGEST_SHARED
    return best, best_followed


@compiled
def _read_ahead(part: int, first: int, stop: int, files: Files) -> None:
    """Ask the kernel once for all rows of a part that a search will read: the rows [first, stop), and those around
    them from which occurrences are drawn."""
    row_bytes, rows = 2 * files.columns, _of_part(part, _ROWS, files)
    low, high = max(_NONE, first - _DRAWN_FROM), min(_of_part(part, _NUM_ROWS, files), stop + _DRAWN_FROM)
    begin = (rows + low * row_bytes) // _PAGE * _PAGE
    _MADVISE(begin, rows + high * row_bytes - begin, _WILL_NEED)


@compiled
def _following_row(row: int, order: int, step: int, files: Files) -> int:
    """The token that follows a row of an order, a multiple of a power of 32; -1 = none."""
    part = _part_of(row, order, files)
    row, below = row - _of_part(part, _FIRST_ROW, files), _of_part(part, _NUM_ROWS, files)
    table, start = _table(part, files), 0
    while step > 1 and below > FAN_OUT:  # a part of few rows has fewer levels than the largest part
        start, below = start + below, -(-below // FAN_OUT)
        row, step = row // FAN_OUT, step // FAN_OUT
    token: Any = np.int64(table[start + row, 0])
    if files.columns > 2:
        token |= np.int64(table[start + row, 1]) << 16
    if token > files.vocabulary:
        _int64(files.damaged)[0] = part
        raise DamagedRows
    return token - 1


@compiled
def _level_starts(count: int) -> np.ndarray:
    """The first row of each level in `rows.npy`, then the number of rows of all."""
    starts, levels = np.zeros(16, np.int64), 1
    starts[1] = count
    while count > FAN_OUT:
        count = -(-count // FAN_OUT)
        starts[levels + 1] = starts[levels] + count
        levels += 1
    return starts[: levels + 1]


@compiled
def _table(part: int, files: Files) -> np.ndarray:
    """The stored rows of all levels of a part, [rows, columns] uint16. Indexes are not checked."""
    return carray(_uint16(_of_part(part, _ROWS, files)), (_of_part(part, _ALL_ROWS, files), files.columns))


# --- orders -------------------------------------------------------------------------------------------------------


@compiled
def _rows_of(order: int, files: Files) -> int:
    last = _first_part(order + 1, files) - 1
    return (
        _of_part(last, _FIRST_ROW, files) + _of_part(last, _NUM_ROWS, files) if last >= _first_part(order, files) else 0
    )


@compiled
def _part_of(row: int, order: int, files: Files) -> int:
    """The part of a row of an order."""
    first, last = _first_part(order, files), _first_part(order + 1, files) - 1
    return _last_up_to(row, files.parts, _PART_COLUMNS, first, last)


@compiled
def _position(row: int, order: int, files: Files) -> int:
    """The position of the last token of a prefix."""
    part = _part_of(row, order, files)
    return _position_in(part, row - _of_part(part, _FIRST_ROW, files), files)


@compiled
def _position_in(part: int, row: int, files: Files) -> int:
    size = _of_part(part, _POSITION_BYTES, files)
    return _number(_of_part(part, _POSITIONS, files) + row * size, size)


@compiled
def _head(text: np.ndarray, size: int, files: Files) -> np.uint64:
    """The head of a text: its last tokens, each plus 1, as one number; 0 before it begins."""
    number, bits = np.uint64(0), np.uint64(64 // files.head_tokens)
    for at in range(files.head_tokens):
        number = number << bits | np.uint64(text[at] + 1 if at < size else 0)
    return number


@compiled
def _row_before(head: np.uint64, order: int, files: Files) -> int:
    """The last row with a stored head that is smaller than this one; 0 if there is none. The rows before it have
    smaller heads too."""
    part, heads = _stored_heads(head, order, False, files)
    if not heads:
        return 0
    return _of_part(part, _FIRST_ROW, files) + (heads - 1) * files.rows_of_head


@compiled
def _row_after(head: np.uint64, order: int, files: Files) -> int:
    """The first row with a stored head that is greater than this one, or the end of its part. The rows behind it have
    greater heads too."""
    part, heads = _stored_heads(head, order, True, files)
    if not heads:
        return 0
    return _of_part(part, _FIRST_ROW, files) + min(heads * files.rows_of_head, _of_part(part, _NUM_ROWS, files))


@compiled
def _stored_heads(head: np.uint64, order: int, or_equal: bool, files: Files) -> tuple[int, int]:
    """Find the last part of an order whose first head is smaller than this one, or, with `or_equal`, equal to it.

    Returns:
        the part, and how many of its stored heads are smaller (or equal); 0 heads if there is no such part.
    """
    first, stop = _first_part(order, files), _first_part(order + 1, files)
    part = _below(files.first_heads, first, stop, head, or_equal) - 1
    if part < first:
        return first, 0
    return part, _below(_of_part(part, _HEADS, files), _NONE, _of_part(part, _NUM_HEADS, files), head, or_equal)


@compiled
def _below(heads: int, low: int, high: int, head: np.uint64, or_equal: bool) -> int:
    """The first of the heads [low, high) at an address that is at least this one; with `or_equal`, greater than it.
    `high` if none is."""
    while low < high:
        middle = (low + high) // 2
        found = _uint64(heads)[middle]
        if found < head or (or_equal and found == head):
            low = middle + 1
        else:
            high = middle
    return low


# --- texts --------------------------------------------------------------------------------------------------------


@compiled
def _shared(position: int, text: np.ndarray, size: int, files: Files) -> int:
    """How many last tokens the document up to a position has in common with a text.

    Where a document begins is read only if these are in more than one chunk, as it is one more read of the disk.
    """
    shard = _shard_of(position, files)
    end = position - _of_shard(shard, _FIRST, files)
    in_chunk = min(size, end % files.chunk_length + 1)
    shared = _equal(shard, end, text, _NONE, in_chunk, files)
    if shared < in_chunk or shared == size:
        return shared
    return _equal(shard, end, text, shared, min(size, end + 1 - _first_of(shard, end, files)), files)


@compiled
def _equal(shard: int, end: int, text: np.ndarray, first: int, stop: int, files: Files) -> int:
    """The first of some last tokens that differs from the text's, or `stop`."""
    tokens = _of_shard(shard, _TOKENS, files)
    while first < stop and _number(tokens + (end - first) * files.token_bytes, files.token_bytes) == text[first]:
        first += 1
    return first


@compiled
def _is_smaller(position: int, text: np.ndarray, size: int, files: Files) -> bool:
    """Whether the prefix that ends at a position is before a text in the order of their last tokens."""
    shared = _shared(position, text, size, files)
    if shared == size:
        return False
    shard = _shard_of(position, files)
    end = position - _of_shard(shard, _FIRST, files)
    if shared == end + 1 - _first_of(shard, end, files):
        return True  # it begins there
    token_bytes = files.token_bytes
    return _number(_of_shard(shard, _TOKENS, files) + (end - shared) * token_bytes, token_bytes) < text[shared]


@compiled
def next_token(position: int, files: Files) -> int:
    """The token after a position in the same document; -1 = none."""
    shard = _shard_of(position, files)
    after = position + 1 - _of_shard(shard, _FIRST, files)
    if position + 1 == _of_shard(shard + 1, _FIRST, files):
        return -1  # the last one of the shard
    chunk, place = after // files.chunk_length, after % files.chunk_length
    if place:
        ends = place >= _number(_of_shard(shard, _LENGTHS, files) + 2 * chunk, 2)
    else:  # the first one of a chunk, and the first one of another document if that begins with this chunk
        ends = _first_of(shard, after, files) == after
    if ends:
        return -1
    token = _number(_of_shard(shard, _TOKENS, files) + after * files.token_bytes, files.token_bytes)
    if token >= files.vocabulary:
        _int64(files.damaged)[0] = shard
        raise DamagedText
    return token


@compiled
def _first_of(shard: int, end: int, files: Files) -> int:
    """The first position of the document of a position, both counted from the first one of its shard."""
    chunk, offsets = end // files.chunk_length, _int64(_of_shard(shard, _OFFSETS, files))
    # Behind the last document is the number of chunks.
    document = _last_up_to(chunk, _of_shard(shard, _OFFSETS, files), _ONE, _NONE, _of_shard(shard, _DOCUMENTS, files))
    if not 0 <= offsets[document] <= chunk:  # tokens before the shard would be read
        _int64(files.damaged)[0] = shard
        raise DamagedText
    return offsets[document] * files.chunk_length


@compiled
def _is_living(position: int, deleted: np.ndarray, files: Files) -> bool:
    """Whether a position is outside of some ranges of chunks."""
    chunk, low, high = position // files.chunk_length, 0, len(deleted)
    while low < high:  # the ranges that begin up to this chunk
        middle = (low + high) // 2
        if deleted[middle, 0] <= chunk:
            low = middle + 1
        else:
            high = middle
    return low == 0 or deleted[low - 1, 1] <= chunk


@compiled
def _shard_of(position: int, files: Files) -> int:
    """The shard of a position; raises NotOpen."""
    shard = _last_up_to(position, files.shards, _SHARD_COLUMNS, _NONE, files.num_shards)
    if _of_shard(shard, _TOKENS, files) == 0:
        raise NotOpen(shard)
    return shard


# --- memory -------------------------------------------------------------------------------------------------------


def _pointer_to(number: types.Type) -> Any:
    """A function of compiled code: an address as an array of such numbers."""

    @intrinsic
    def pointer(_: Any, address: types.Type) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(address), generate

    return pointer


_uint8, _uint16, _uint32 = _pointer_to(types.uint8), _pointer_to(types.uint16), _pointer_to(types.uint32)
_uint64, _int64 = _pointer_to(types.uint64), _pointer_to(types.int64)


@compiled
def _last_up_to(number: int, numbers: int, step: int, low: int, high: int) -> int:
    """The last of the numbers from place `low` to `high`, ascending, that is not greater than this one; `low` if all
    are.

    Args:
        number: the number.
        numbers: address of int64.
        step: the number of a place is `step` numbers behind that of the place before.
        low: first place.
        high: last place.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if _int64(numbers)[step * middle] <= number:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _of_part(part: int, column: int, files: Files) -> Any:
    """See `Files.parts`."""
    return _int64(files.parts)[_PART_COLUMNS * part + column]


@compiled
def _of_shard(shard: int, column: int, files: Files) -> Any:
    """See `Files.shards`."""
    return _int64(files.shards)[_SHARD_COLUMNS * shard + column]


@compiled
def _first_part(order: int, files: Files) -> Any:
    """See `Files.orders`."""
    return _int64(files.orders)[order]


@compiled
def _number(address: int, size: int) -> Any:
    """A stored number of some bytes, the lowest one first."""
    if size == 2:
        return np.int64(_uint16(address)[0])
    if size == 4:
        return np.int64(_uint32(address)[0])
    number = np.int64(0)
    for byte in range(size):
        number |= np.int64(_uint8(address)[byte]) << 8 * byte
    return number
