"""zstd is decompressed block by block: equal contents, every truncation is noticed, and memory does not grow with the expansion."""

import io
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from indexing.corpus.zstd_frames import DamagedZstd, ZstdReader

pieces = st.one_of(st.binary(max_size=300), st.builds(bytes.__mul__, st.binary(max_size=4), st.integers(0, 50_000)))
frames = st.lists(st.tuples(pieces, st.sampled_from((-5, 1, 3)), st.booleans(), st.booleans(), st.booleans()), max_size=4)  # fmt: skip


def packed(data: bytes, level: int, checksum: bool, size: bool, is_stream: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(level, write_checksum=checksum, write_content_size=size)
    if not is_stream:
        return compressor.compress(data)
    stream = compressor.compressobj()
    return stream.compress(data[: len(data) // 2]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + stream.compress(data[len(data) // 2 :]) + stream.flush()  # fmt: skip


def read(stored: bytes, size: int = 1 << 16) -> bytes:
    reader = io.BufferedReader(ZstdReader(io.BytesIO(stored)), 1 << 17)
    return b"".join(iter(lambda: reader.read(size), b""))


@hypothesis_settings(max_examples=25, deadline=None)
@given(frames, st.sampled_from((1 << 16, 777)))
def test_contents_of_all_frames_are_equal(parts: list[tuple[bytes, int, bool, bool, bool]], size: int) -> None:
    skippable = b"\x5f\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    assert read(skippable.join(packed(*part) for part in parts), size) == b"".join(part[0] for part in parts)


def test_every_truncation_is_an_end_of_file_and_every_flipped_bit_is_contained() -> None:
    stored = packed(b"some text to repeat " * 40, 3, True, False, False)
    for end in range(1, len(stored)):
        with pytest.raises(EOFError):
            read(stored[:end])
    for place in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[place] ^= 1 << bit
            try:
                read(bytes(damaged))
            except (EOFError, DamagedZstd):
                continue


def test_a_wide_window_needs_as_many_stored_bytes() -> None:
    """A window of 2 GiB holds all that was decompressed: 65 kB of zeros must not fill it, 400 MB of text may."""
    program = (
        "import io, resource, sys\n"
        "from indexing.corpus.zstd_frames import DamagedZstd, ZstdReader\n"
        "import zstandard\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "reader = io.BufferedReader(ZstdReader(io.BytesIO(sys.stdin.buffer.read())))\n"
        "total = 0\n"
        "try:\n"
        "    while block := reader.read(1 << 20):\n"
        "        total += len(block)\n"
        "except DamagedZstd as error:\n"
        "    print(error)\n"
        "print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    block = 1 << 17
    header = b"\x28\xb5\x2f\xfd\0\xa8"
    assert zstandard.get_frame_parameters(header).window_size == 1 << 31
    repeated = (block << 3 | 1 << 1).to_bytes(3, "little") + b"x"
    stored = header + repeated * 8000  # 32 kB for 1 GB
    output = subprocess.run([sys.executable, "-c", program], input=stored, capture_output=True, check=True).stdout
    message, figures = output.decode().splitlines()
    assert "a window of 2,147,483,648 bytes" in message
    total, kilobytes = map(int, figures.split())
    assert 1 << 27 < total < (1 << 27) + (1 << 24)
    assert kilobytes << 10 < (1 << 27) + (1 << 26)
    narrow = header[:4] + b"\0" + b"\x68" + repeated * 8000  # a window of 8 MiB: any expansion
    last = narrow[: -len(repeated)] + (block << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"x"
    output = subprocess.run([sys.executable, "-c", program], input=last, capture_output=True, check=True).stdout
    total, kilobytes = map(int, output.split())
    assert total == 8000 * block
    assert kilobytes < 64 << 10
