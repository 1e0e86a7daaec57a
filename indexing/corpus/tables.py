"""Read tables: a document for each row of a Parquet or Arrow file. Memory holds one batch of rows.

Parquet   a footer leads to the pages of each column: the file is read out of order, and only the needed columns
Arrow     record batches in sequence, as Hugging Face `datasets` stores them; the file format wraps this stream
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

from indexing.corpus.documents import Document, ReadRequest, marked, record_document

PARQUET_SUFFIX, ARROW_SUFFIX = ".parquet", ".arrow"
_PARQUET_MAGIC, _ARROW_FILE_MAGIC, _ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_ROWS = 256  # as Python values at a time
# In the messages of pyarrow about files that end too early.
_SHORT = ("not found in footer", "file size is", "only read", "bytes available", "Expected to be able to read", "null or length 0")  # fmt: skip


def parquet_rows(stored: Any, request: ReadRequest) -> Iterator[Document]:
    """Yield the documents of a Parquet file, which is seekable, and report problems by row."""
    if stored.read(len(_PARQUET_MAGIC)) not in (_PARQUET_MAGIC, b""):
        request.report("wrong suffix", 1, "its content is not Parquet; rename the file")
        return
    yield from _rows(lambda keys: _parquet_batches(stored, request.start, keys), request)


def arrow_rows(stream: io.BufferedReader, request: ReadRequest) -> Iterator[Document]:
    """Yield the documents of an Arrow file, which may have the file or the stream format, and report problems by row."""
    head = stream.peek(len(_ARROW_FILE_MAGIC))
    if head.startswith(_ARROW_FILE_MAGIC):
        stream.read(len(_ARROW_FILE_MAGIC))  # a stream follows
    elif head and not head.startswith(_ARROW_STREAM_MAGIC):
        request.report("wrong suffix", 1, "its content is not Arrow (IPC); rename the file")
        return
    yield from _rows(lambda keys: _arrow_batches(stream), request)


def _parquet_batches(stored: Any, start: int, keys: list[str]) -> Iterator[tuple[int, Any, list[str]]]:
    """Yield the first row, a batch and the file's columns, from the row group that holds row `start`."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(stored, page_checksum_verification=True)
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    record = first = 0
    while first < len(sizes) and record + sizes[first] <= start:
        record += sizes[first]
        first += 1
    names = parquet.schema_arrow.names
    columns = [key for key in keys if key in names or key.split(".")[0] in names]
    for batch in parquet.iter_batches(_ROWS, row_groups=list(range(first, len(sizes))), columns=columns):
        yield record, batch, names
        record += batch.num_rows


def _arrow_batches(stream: io.BufferedReader) -> Iterator[tuple[int, Any, list[str]]]:
    """Yield the first row, a batch and the file's columns."""
    import pyarrow as pa

    reader, record = pa.ipc.open_stream(stream), 0
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
            for begin in range(0, batch.num_rows, _ROWS):
                values = {key: _values(column.slice(begin, _ROWS)) for key, column in columns.items()}
                for row in range(min(_ROWS, batch.num_rows - begin)):
                    if request.stop is not None and record >= request.stop:
                        return
                    if record >= request.start:
                        fields = {key: column[row] for key, column in values.items()}
                        yield from record_document(fields, request, record, 0, names)
                    record += 1
    except pa.ArrowNotImplementedError as error:
        request.report("unreadable file", record + 1, str(error))
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:  # a damaged length takes any memory
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # a disk or network error; Arrow's own errors about contents are plain OSErrors without a number
        is_short = any(words in str(error) for words in _SHORT)
        request.report("truncated file" if is_short else "damaged file", record + 1, str(error))


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
        column = column.dictionary_decode()
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
