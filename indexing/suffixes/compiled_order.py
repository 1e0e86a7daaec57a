"""Compiled loops that make an order: they read the last tokens of prefixes, and sort by these.

    a shard: first 8 bytes of tokens ─ radix sort ─► a run
    merged runs ─► groups with equal first 8 bytes ─ sort by the next 8 ─► groups of equal ones ─ … ─► the order

Rows are [1 + w]: the token after a prefix, then its last w ones backwards, all plus 1; 0 = none.
"""

import numpy as np

from indexing.machine import compiled

_BYTE, _BITS = np.uint64(255), np.uint64(8)
_FEW = 48  # keys that are sorted by insertion
_FEW_ROWS = 8  # rows that are compared with each other, instead of word by word


@compiled
def read_rows(
    tokens: np.ndarray,
    lengths: np.ndarray,
    begins: np.ndarray,
    chunk_length: int,
    ends: np.ndarray,
    places: np.ndarray,
    out: np.ndarray,
) -> None:
    """Read the rows of prefixes of one shard, `out[places[i]]` for the one that ends at `ends[i]`.

    Args:
        tokens: [chunks · m].
        lengths: [chunks], real tokens of each.
        begins: [chunks] bool, whether a document begins with it.
        chunk_length: m.
        ends: [n], below chunks · m.
        places: [n], rows of `out`.
        out: [rows, 1 + w].
    """
    most = out.shape[1] - 1
    for i in range(len(ends)):
        end, row = ends[i], out[places[i]]
        chunk = (end + 1) // chunk_length
        place = end + 1 - chunk * chunk_length  # of the token after it
        is_there = chunk < min(len(begins), len(lengths)) and place < lengths[chunk]
        follows = is_there and not (place == 0 and begins[chunk])
        row[0] = tokens[end + 1] + 1 if follows else 0
        count = min(most, _available(begins, chunk_length, end, most))
        for back in range(count):
            row[1 + back] = tokens[end - back] + 1
        row[1 + count :] = 0


@compiled
def read_heads(
    tokens: np.ndarray, begins: np.ndarray, chunk_length: int, ends: np.ndarray, width: int, out: np.ndarray
) -> None:
    """Read the last `width` tokens plus 1 of prefixes of one shard as numbers, [n] uint64; see `read_rows`."""
    bits = np.uint64(64 // width)
    for i in range(len(ends)):
        available, head = _available(begins, chunk_length, ends[i], width), np.uint64(0)
        for place in range(width):
            head <<= bits
            if place < available:
                head |= np.uint64(tokens[ends[i] - place] + 1)
        out[i] = head


@compiled
def _available(begins: np.ndarray, chunk_length: int, end: int, most: int) -> int:
    """Tokens of the document up to `end`; if there are more than `most`, perhaps not all."""
    chunk = end // chunk_length
    while chunk > 0 and not begins[chunk] and end + 1 - chunk * chunk_length < most:
        chunk -= 1
    return end + 1 - chunk * chunk_length


@compiled
def sort_heads(heads: np.ndarray, order: np.ndarray) -> None:
    """Sort heads [n] in place; `order` [n] int64 receives their numbers. Equal ones stay in their order."""
    for place in range(len(order)):
        order[place] = place
    spare = np.empty(len(heads), np.uint64), np.empty(len(heads), np.int64)
    _sort(heads, order, 0, len(heads), spare, np.empty(256, np.int64))


@compiled
def sort_groups(rows: np.ndarray, compared: int, order: np.ndarray) -> None:
    """Sort rows [n, 1 + w] that are sorted by the first 8 bytes of their last tokens, by more of these; equal ones stay
    in their order.

    Args:
        rows: the rows, sorted in place.
        compared: tokens, whole words of 8 bytes.
        order: numbers of the rows, [n] int64, which move with them.
    """
    count, width = len(rows), 8 // rows.itemsize
    keys, places = np.empty(count, np.uint64), np.arange(count)  # places: which row is at each place
    spare, counts = (np.empty(count, np.uint64), np.empty(count, np.int64)), np.empty(256, np.int64)
    for row in range(count):
        keys[row] = _word(rows[row], 0, width)
    # Groups [first, stop) of rows that are equal so far: those of this word, and those of the next.
    groups, later = np.empty((count // 2 + 1, 2), np.int64), np.empty((count // 2 + 1, 2), np.int64)
    first = 0
    while first < count:
        stop, word = _end_of_group(keys, first, count), 1
        found = _add_groups(keys, first, stop, width, groups, 0)
        while found and word < compared // width:
            found_later = 0
            for group in range(found):
                start, end = groups[group]
                if end - start <= _FEW_ROWS:
                    _insert_rows(rows, places, start, end, 1 + word * width, 1 + compared)
                    continue
                for place in range(start, end):
                    keys[place] = _word(rows[places[place]], word, width)
                _sort(keys, places, start, end, spare, counts)
                found_later = _add_groups(keys, start, end, width, later, found_later)
            groups, later, found, word = later, groups, found_later, word + 1
        if word > 1:
            _move(rows, order, places, first, stop)
        first = stop


@compiled
def _insert_rows(rows: np.ndarray, places: np.ndarray, first: int, stop: int, start: int, end: int) -> None:
    """Sort the few rows at the places [first, stop) by the columns [start, end)."""
    for place in range(first + 1, stop):
        row, to = places[place], place
        while to > first and _is_less(rows[row], rows[places[to - 1]], start, end):
            places[to] = places[to - 1]
            to -= 1
        places[to] = row


@compiled
def _is_less(row: np.ndarray, other: np.ndarray, start: int, end: int) -> bool:
    """Whether a row is before another one by the columns [start, end)."""
    for column in range(start, end):
        if row[column] != other[column]:
            return bool(row[column] < other[column])
    return False


@compiled
def _move(rows: np.ndarray, order: np.ndarray, places: np.ndarray, first: int, stop: int) -> None:
    """Move rows [first, stop) and their numbers: to each place the one that was at `places`."""
    while first < stop and places[first] == first:
        first += 1
    moved, numbers = rows[first:stop].copy(), order[first:stop].copy()
    for place in range(first, stop):
        rows[place], order[place] = moved[places[place] - first], numbers[places[place] - first]


@compiled
def _word(row: np.ndarray, number: int, width: int) -> np.uint64:
    """A word of a row: `width` tokens, the first one in the highest bits."""
    word, bits = np.uint64(0), np.uint64(64 // width)
    for place in range(1 + number * width, 1 + (number + 1) * width):
        word = word << bits | np.uint64(row[place])
    return word


@compiled
def _end_of_group(keys: np.ndarray, first: int, count: int) -> int:
    """The end of the equal keys that begin at `first`."""
    stop = first + 1
    while stop < count and keys[stop] == keys[first]:
        stop += 1
    return stop


@compiled
def _add_groups(keys: np.ndarray, first: int, stop: int, width: int, groups: np.ndarray, found: int) -> int:
    """Add the groups of equal keys in [first, stop) that have two rows or more, and whose documents go on before this
    word."""
    last = np.uint64(1 << 64 // width) - np.uint64(1)  # the bits of a word's last token
    while first < stop:
        end = _end_of_group(keys, first, stop)
        if end - first > 1 and keys[first] & last:
            groups[found, 0], groups[found, 1] = first, end
            found += 1
        first = end
    return found


@compiled
def _sort(
    keys: np.ndarray,
    rows: np.ndarray,
    first: int,
    stop: int,
    spare: tuple[np.ndarray, np.ndarray],
    counts: np.ndarray,
) -> None:
    """Sort [first, stop) of keys, with their rows; equal keys stay in their order."""
    differ = np.uint64(0)
    for place in range(first + 1, stop):
        differ |= keys[place] ^ keys[first]
    if differ == 0:
        return
    if stop - first <= _FEW:
        for place in range(first + 1, stop):
            key, row, to = keys[place], rows[place], place
            while to > first and keys[to - 1] > key:
                keys[to], rows[to] = keys[to - 1], rows[to - 1]
                to -= 1
            keys[to], rows[to] = key, row
        return
    read, read_rows, write, write_rows, in_spare = keys, rows, spare[0], spare[1], False
    for byte in range(8):  # the lowest first; those that are equal in all keys change nothing
        shift = np.uint64(byte) * _BITS
        if not differ >> shift & _BYTE:
            continue
        counts[:] = 0
        for place in range(first, stop):
            counts[np.int64(read[place] >> shift & _BYTE)] += 1
        begin = np.int64(first)
        for digit in range(256):
            begin, counts[digit] = begin + counts[digit], begin
        for place in range(first, stop):
            value = np.int64(read[place] >> shift & _BYTE)
            to = counts[value]
            write[to], write_rows[to] = read[place], read_rows[place]
            counts[value] = to + 1
        read, read_rows, write, write_rows, in_spare = write, write_rows, read, read_rows, not in_spare
    if in_spare:
        keys[first:stop], rows[first:stop] = spare[0][first:stop], spare[1][first:stop]
