"""Read tables: a document for each row of a Parquet file."""

from collections.abc import Iterator
from typing import Any

from indexing.corpus.documents import Document, ReadRequest, marked, record_document

PARQUET_SUFFIX = ".parquet"  # one document per row
_PARQUET_MAGIC = b"PAR1"


def parquet_rows(stored: Any, request: ReadRequest) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    settings = request.settings
    keys = (settings.text_key, settings.id_key, *settings.metadata_keys)
    record = 0
    if stored.read(len(_PARQUET_MAGIC)) not in (_PARQUET_MAGIC, b""):
        request.report("wrong suffix", 1, "its content is not Parquet; rename the file")
        return
    try:
        parquet = pq.ParquetFile(stored, page_checksum_verification=True)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        first = 0
        while first < len(sizes) and record + sizes[first] <= request.start:
            record += sizes[first]
            first += 1
        names = parquet.schema_arrow.names
        columns = [key for key in dict.fromkeys(keys) if key in names or key.split(".")[0] in names]
        for batch in parquet.iter_batches(256, row_groups=list(range(first, len(sizes))), columns=columns):
            values = {key: _column(batch, key) for key in keys}
            for row in range(batch.num_rows):
                if request.stop is not None and record >= request.stop:
                    return
                if record >= request.start:
                    fields = {key: column[row] for key, column in values.items() if column is not None}
                    yield from record_document(fields, request, record, 0, names)
                record += 1
    except pa.ArrowNotImplementedError as error:
        request.report("unreadable file", record + 1, str(error))
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # a disk or network error; Arrow's own errors about contents are plain OSErrors without a number
        is_short = any(words in str(error) for words in ("not found in footer", "file size is"))
        request.report("truncated file" if is_short else "damaged file", record + 1, str(error))


def _column(batch: Any, key: str) -> list[Any] | None:
    """A column, or a field of a struct column, as Python values. Strings stay bytes, because Arrow does not validate them.

    So do values of a column of bytes, which some writers use for text; `BinaryValue` marks those that are not text.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    path = [key] if key in batch.schema.names else key.split(".")
    if path[0] not in batch.schema.names:
        return None
    column = batch.column(path[0])
    for part in path[1:]:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return None
        column = pc.struct_field(column, part)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif pa.types.is_string_view(column.type):
        column = column.cast(pa.binary_view())
    elif any(test(column.type) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)) or (
        pa.types.is_fixed_size_binary(column.type)
    ):
        return [value if value is None else marked(value) for value in column.to_pylist()]
    elif getattr(column.type, "unit", "") == "ns":  # Python's times have microseconds
        times = {
            pa.types.is_timestamp: lambda: pa.timestamp("us", column.type.tz),
            pa.types.is_time: lambda: pa.time64("us"),
        }
        kind = next((make() for test, make in times.items() if test(column.type)), pa.duration("us"))
        column = column.cast(kind, safe=False)
    return column.to_pylist()
