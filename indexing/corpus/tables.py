"""Read tables: a document for each row of a Parquet or Arrow file. Memory holds one batch of rows.

Parquet   a footer leads to the pages of each column: the file is read out of order, and only the needed columns
Arrow     record batches in sequence, as Hugging Face `datasets` stores them; the file format wraps this stream

Both compress, and a dictionary stores a value once for many rows. So few bytes can claim any memory: the sizes that a
file claims are compared with its bytes before pyarrow decompresses them, and rows become Python values in slices of
bounded size.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from indexing.corpus.documents import Document, ReadRequest, marked, record_document

PARQUET_SUFFIX, ARROW_SUFFIX = ".parquet", ".arrow"
_PARQUET_MAGIC, _ARROW_FILE_MAGIC, _ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_ROWS, _SLICE_BYTES = 256, 1 << 26  # as Python values at a time
# A batch or row group may have this size, and more if its stored bytes are enough for it. Text compresses 3 to 10
# times.
_FREE_BYTES, _MOST_EXPANSION = 1 << 27, 64
_FRAME_MAGIC = (0xFD2FB528, 0x184D2204)  # of zstd and LZ4
_MOST_CLAIM = 1 << 40  # larger ones are refused by the allocator
_DICTIONARY_PAGE = 2
# In the messages of pyarrow about files that end too early.
_SHORT = ("not found in footer", "file size is", "only read", "bytes available", "Expected to be able to read", "null or length 0")  # fmt: skip


def parquet_rows(stored: Any, request: ReadRequest) -> Iterator[Document]:
    """Yield the documents of a Parquet file, which is seekable, and report problems by row."""
    if stored.read(len(_PARQUET_MAGIC)) not in (_PARQUET_MAGIC, b""):
        request.report("wrong suffix", 1, "its content is not Parquet; rename the file")
        return
    yield from _rows(lambda keys: _parquet_batches(stored, request.start, keys), request)


def arrow_rows(stream: io.BufferedReader, request: ReadRequest) -> Iterator[Document]:
    """Yield the documents of an Arrow file, which may have the file or the stream format, and report problems by
    row."""
    head = stream.peek(len(_ARROW_FILE_MAGIC))
    if head.startswith(_ARROW_FILE_MAGIC):
        stream.read(len(_ARROW_FILE_MAGIC))  # a stream follows
    elif head and not head.startswith(_ARROW_STREAM_MAGIC):
        request.report("wrong suffix", 1, "its content is not Arrow (IPC); rename the file")
        return
    yield from _rows(lambda keys: _arrow_batches(stream), request)


def _parquet_batches(stored: Any, start: int, keys: list[str]) -> Iterator[tuple[int, Any, list[str]]]:
    """Yield the first row, a batch and the file's columns, from the row group that holds row `start`.

    Raises:
        pyarrow.ArrowInvalid: a row group claims more bytes than its stored ones can hold.
    """
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(stored, page_checksum_verification=True)
    record, names = 0, parquet.schema_arrow.names
    columns = [key for key in keys if key in names or key.split(".")[0] in names]
    for group in range(parquet.num_row_groups):
        found = parquet.metadata.row_group(group)
        if record + found.num_rows <= start:
            record += found.num_rows
            continue
        for batch in parquet.iter_batches(_batch_rows(stored, found, columns), row_groups=[group], columns=columns):
            yield record, batch, names
            record += batch.num_rows


def _batch_rows(stored: Any, group: Any, columns: list[str]) -> int:
    """Rows of a row group to read at a time. A value of a dictionary has at most the bytes of the dictionary, and may
    be in each row."""
    parts = [group.column(number) for number in range(group.num_columns)]
    parts = [part for part in parts if any(f"{part.path_in_schema}.".startswith(f"{one}.") for one in columns)]
    claimed = sum(part.total_uncompressed_size for part in parts)
    _check_claim(claimed, min(sum(part.total_compressed_size for part in parts), stored.seek(0, io.SEEK_END)))
    row_bytes = claimed // max(1, group.num_rows) + sum(_dictionary_bytes(stored, part) for part in parts)
    return max(1, min(_ROWS, _SLICE_BYTES // max(1, row_bytes)))


def _dictionary_bytes(stored: Any, part: Any) -> int:
    """Bytes of the dictionary of a column in a row group, decompressed, as its page claims; 0 without one.

    A page begins with its type and this size, as Thrift's compact protocol writes them: a byte for the field, then a
    zigzag varint.
    """
    offsets = (part.dictionary_page_offset, part.data_page_offset)
    stored.seek(max(0, min(offset for offset in offsets if offset is not None)))
    header, values, at = stored.read(16), list[int](), 0
    for _ in range(2):
        at, value, shift = at + 1, 0, 0
        for byte in header[at:]:
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                break
        values.append(value >> 1)
    return values[1] if values[0] == _DICTIONARY_PAGE else 0


def _check_claim(claimed: int, stored: int) -> None:
    """Compare claimed with stored bytes.

    Raises:
        pyarrow.ArrowInvalid: they are too few.
    """
    import pyarrow as pa

    if claimed > _FREE_BYTES + _MOST_EXPANSION * stored:
        raise pa.ArrowInvalid(
            f"{stored:,} stored bytes claim to hold {claimed:,}; accepted above {_FREE_BYTES:,}: an expansion by {_MOST_EXPANSION}"
        )


class _CheckedBodies:
    """An Arrow stream whose compressed buffers are compared with what they claim, before pyarrow decompresses them.

    pyarrow reads the body of a message at once. In it a buffer begins at a multiple of 8 bytes: with its decompressed
    size, then a frame of zstd or LZ4.
    """

    closed = False

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        words = np.frombuffer(data, "<u8", len(data) // 8)
        claims = words[:-1][np.isin(words[1:] & 0xFFFFFFFF, _FRAME_MAGIC)]
        _check_claim(sum(claims[claims < _MOST_CLAIM].tolist()), len(data))
        return data

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self.closed = True


def _arrow_batches(stream: io.BufferedReader) -> Iterator[tuple[int, Any, list[str]]]:
    """Yield the first row, a batch and the file's columns."""
    import pyarrow as pa

    reader, record = pa.ipc.open_stream(_CheckedBodies(stream)), 0
    for batch in reader:
        batch.validate()  # before anything follows the offsets, which the file decides
        yield record, batch, reader.schema.names
        record += batch.num_rows


def _rows(
    batches: Callable[[list[str]], Iterator[tuple[int, Any, list[str]]]], request: ReadRequest
) -> Iterator[Document]:
    """Yield the documents of the requested rows of `batches(keys)`; damage ends the file and is reported."""
    import pyarrow as pa

    settings, record = request.settings, 0
    keys = list(dict.fromkeys((settings.text_key, settings.id_key, *settings.metadata_keys)))
    try:
        for first, batch, names in batches(keys):
            record = first
            if record + batch.num_rows <= request.start:
                continue
            columns = {key: column for key in keys if (column := _column(batch, key)) is not None}
            begin = 0
            while begin < batch.num_rows:
                rows = _slice_rows(list(columns.values()), begin, batch.num_rows - begin)
                size = sum(_shared_bytes(column.slice(begin, 1)) for column in columns.values()) if rows == 1 else 0
                if size > settings.max_line_bytes:  # before it exists
                    if record >= request.start:
                        _report_long(request, record, size)
                    begin, record = begin + 1, record + 1
                    continue
                values = {key: _values(column.slice(begin, rows)) for key, column in columns.items()}
                for row in range(rows):
                    if request.stop is not None and record >= request.stop:
                        return
                    if record >= request.start:
                        fields = {key: column[row] for key, column in values.items()}
                        yield from _bounded_document(fields, request, record, names)
                    record += 1
                begin += rows
    except pa.ArrowNotImplementedError as error:
        request.report("unreadable file", record + 1, str(error))
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:  # a damaged length takes any memory
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # a disk or network error; Arrow's own errors about contents are plain OSErrors without a number
        is_short = any(words in str(error) for words in _SHORT)
        request.report("truncated file" if is_short else "damaged file", record + 1, str(error))


def _bounded_document(
    fields: dict[str, Any], request: ReadRequest, record: int, names: list[str]
) -> Iterator[Document]:
    size, limit = sum(map(_size, fields.values())), request.settings.max_line_bytes
    if size > limit:
        _report_long(request, record, size)
    else:
        yield from record_document(fields, request, record, 0, names)


def _report_long(request: ReadRequest, record: int, size: int) -> None:
    limit = request.settings.max_line_bytes
    request.report(
        "long record", record + 1, f"{size:,} bytes, more than corpus.max_line_bytes = {limit:,}; it is left out"
    )


def _size(value: Any) -> int:
    """Bytes of the strings in a value."""
    if isinstance(value, bytes | str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_size, inner))


def _slice_rows(columns: list[Any], begin: int, rows: int) -> int:
    """How many rows from `begin` become Python values together: as many as `_SLICE_BYTES` hold, and at least one."""
    rows = min(rows, _ROWS)
    while rows > 1 and sum(_python_bytes(column.slice(begin, rows)) for column in columns) > _SLICE_BYTES:
        rows //= 2
    return rows


def _python_bytes(column: Any) -> int:
    """About how many bytes the values of a column have in Python. Rows that share a value of a dictionary share its
    object."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        return 0
    return int(column.nbytes) + _shared_bytes(column)


def _shared_bytes(column: Any) -> int:
    """Bytes of the values of a column that may share stored bytes, also inside structs and lists: each counts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if not _has_shared(kind):
        return 0
    if pa.types.is_dictionary(kind):
        return int(pc.sum(_sizes(column.dictionary).take(column.indices)).as_py() or 0)
    if pa.types.is_run_end_encoded(kind):
        return len(column) * int(pc.max(_sizes(column.values)).as_py() or 0)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        lengths = np.frombuffer(column.buffers()[1], "<i4")[::4]  # a view has 16 bytes, and begins with its length
        return int(lengths[column.offset : column.offset + len(column)].sum(dtype=np.int64))
    parts = column.flatten()  # of the slice: the fields of a struct, the values of lists
    return sum(map(_shared_bytes, parts if isinstance(parts, list) else [parts]))


def _sizes(values: Any) -> Any:
    """About how many bytes each of some values has, int64 [n]: strings exactly, others at most all of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    ):
        return pc.binary_length(values).cast(pa.int64())
    try:
        size = kind.bit_width // 8
    except ValueError:  # lists, views …
        size = int(values.nbytes)
    return pa.array(np.full(len(values), size, np.int64))


def _has_shared(kind: Any) -> bool:
    """Whether rows of a nested type may share values."""
    import pyarrow as pa

    shared = (pa.types.is_dictionary, pa.types.is_string_view, pa.types.is_binary_view, pa.types.is_run_end_encoded)
    return any(test(kind) for test in shared) or any(_has_shared(kind.field(n).type) for n in range(kind.num_fields))


def _column(batch: Any, key: str) -> Any:
    """A column, or a field of a struct column; None if the batch has none.

    Raises:
        pyarrow.ArrowInvalid: its offsets are out of range.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = batch.schema.names
    path = [key] if key in names else key.split(".")
    if path[0] not in names:
        return None
    column = batch.column(names.index(path[0]))
    for part in path[1:]:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return None
        column = pc.struct_field(column, part)
    column.cast(_with_bytes(column.type)).validate(full=True)
    return column


def _values(column: Any) -> list[Any]:
    """Rows of a column as Python values. Strings stay bytes, because Arrow does not validate them.

    So do values of a column of bytes, which some writers use for text; `BinaryValue` marks those that are not text.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        used = column.indices.unique().drop_null()
        values = dict(zip(used.to_pylist(), _values(column.dictionary.take(used)), strict=True))
        return [values.get(number) for number in column.indices.to_pylist()]
    if any(test(column.type) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)) or (
        pa.types.is_fixed_size_binary(column.type)
    ):
        return [value if value is None else marked(value) for value in column.to_pylist()]
    if getattr(column.type, "unit", "") == "ns":  # Python's times have microseconds
        times = {
            pa.types.is_timestamp: lambda: pa.timestamp("us", column.type.tz),
            pa.types.is_time: lambda: pa.time64("us"),
        }
        kind = next((make() for test, make in times.items() if test(column.type)), pa.duration("us"))
        return column.cast(kind, safe=False).to_pylist()
    return column.cast(_with_bytes(column.type)).to_pylist()


def _with_bytes(kind: Any) -> Any:
    """An Arrow type with bytes in place of strings, also inside structs and lists."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_with_bytes(kind.value_type)))
    strings = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    return strings.get(kind, kind)
