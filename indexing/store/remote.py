"""Datastores on object storage: a local folder mirrors a URL, and what is missing in it is fetched.

    s3://bucket/wiki/chunks/00000   ⟷   RETRO_CACHE/s3:/bucket/wiki/chunks/00000

    reading:   present(path): fetched on first use, checked against its artifact's manifest, renamed into place
    building:  create(…) uploads a finished artifact, its manifest last, before it becomes visible here

A path with a part such as `s3:` stands for the URL that follows, wherever the folder lies: that is all that any code needs
to know, so paths carry URLs (`pathlib` makes `s3:/bucket` of `s3://bucket`, and `url_of` takes it back). The URL is the truth:
what differs from it here is dropped. For every other path the functions of this file do nothing. fsspec opens the
URLs; it is imported where it is used.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError
from indexing.store.files import MANIFEST, checksum, read_json, write_bytes

_READ_ON_OPEN = (MANIFEST, "deleted.npy")
_TOP_FILES = (*_READ_ON_OPEN, "report.json", "report.html")  # of a datastore, in no artifact
_PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]+:")
# In these a folder is but a name. Asked for one, s3fs makes a missing bucket, which a wrong letter must not do.
# Where names may not be listed, S3 says of a missing one that it is forbidden.
_MISSING = (FileNotFoundError, PermissionError)
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "http", "https"}


# --- names ---------------------------------------------------------------------------------------------------------


def url_of(location: Path | str) -> str | None:
    """The URL that a location names or mirrors; None for a folder of this machine."""
    parts = Path(location).parts
    at = next((number for number, part in enumerate(parts) if _PROTOCOL.fullmatch(part)), None)
    if at is None:
        return None
    root = "///" if parts[at] in ("file:", "local:") else "//"
    return parts[at] + root + "/".join(parts[at + 1 :])


def local_folder(location: Path | str) -> Path:
    """Where a location lies on this machine: itself, or the mirror of its URL in the cache.

    The cache is the folder that the environment variable RETRO_CACHE names, else `~/.cache/retro`.
    """
    url = url_of(location)
    if url is None:
        return Path(location)
    cache = Path(os.environ.get("RETRO_CACHE") or Path.home() / ".cache" / "retro").absolute()
    return cache / Path(url)


def absolute(location: Path | str) -> str:
    """A location as other processes and later runs find it: the URL, or the absolute path."""
    return url_of(location) or str(Path(location).resolve())


def is_away(path: Path) -> bool:
    """Whether a file belongs to a URL and has not been fetched."""
    return url_of(path) is not None and not local_folder(path).exists()


# --- reading -------------------------------------------------------------------------------------------------------


def refresh(folder: Path) -> None:
    """Fetch the top manifest of a mirrored datastore, and what has been deleted. If one has changed, drop the artifacts
    that are others now."""
    if url_of(folder) is None:
        return
    for name in _READ_ON_OPEN:
        missing = (FileNotFoundError,) if name == MANIFEST else _MISSING
        data, path = _read(f"{url_of(folder)}/{name}", missing), folder / name
        if data is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != data:
            with _locked(folder):
                if name == MANIFEST:
                    for manifest in [*folder.glob(f"*/**/{MANIFEST}")]:  # listed before any is removed
                        is_being_written = manifest.parent.name.startswith(".")
                        if not is_being_written:
                            drop_if_changed(manifest.parent)
                write_bytes(path, data)


def drop_if_changed(folder: Path) -> None:
    """Remove what is here of a mirrored artifact that is another one at its URL now, or none."""
    path = folder / MANIFEST
    if url_of(folder) and path.exists() and _read(f"{url_of(folder)}/{MANIFEST}", _MISSING) != path.read_bytes():
        shutil.rmtree(folder)


def present(path: Path) -> Path:
    """A finished artifact, or a file of one, on this machine: fetched if it belongs to a URL and is not there yet.

    Raises:
        InputError: there is none, the URL cannot be read, or what it gives is not what the artifact's manifest says.
    """
    if url_of(path) is None:
        return path
    path = local_folder(path)
    if path.is_file():
        return path
    above = path.parents if path.suffix else (path, *path.parents)
    folder = next((each for each in above if url_of(each) and fetch_manifest(each)), path)
    files: dict[str, Any] = read_json(folder / MANIFEST).get("files", {}) if (folder / MANIFEST).exists() else {}
    wanted = [name for name in files if (folder / name).is_relative_to(path)]
    if not wanted:
        raise InputError(f"{url_of(path)} is not part of anything finished. Run `retro index` to make it.")
    for name in wanted:
        _fetch(folder, name, files[name])
    return path


def fetch_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest, which is fetched if the folder mirrors a URL."""
    path = folder / MANIFEST
    if path.exists() or url_of(folder) is None:
        return path.exists()
    data = _read(f"{url_of(folder)}/{MANIFEST}", _MISSING)
    if data is not None:
        with _locked(folder):
            write_bytes(path, data)
    return data is not None


def _fetch(folder: Path, name: str, expected: dict[str, Any]) -> None:
    file, url = folder / name, f"{url_of(folder)}/{name}"
    if file.exists():
        return
    with _locked(folder):
        if file.exists():  # another process was first
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        try:
            with _asking(url) as (filesystem, root):
                filesystem.get_file(root, str(part))
            found = {"bytes": part.stat().st_size, "checksum": checksum(part)}
            if found != expected:
                raise InputError(
                    f"{url} is not what its manifest says: {found['bytes']:,} bytes with checksum {found['checksum']}, "
                    f"and not {expected['bytes']:,} with {expected['checksum']}. Put the file back, or remove the folder "
                    "that holds the manifest and run the command that made it again."
                )
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)


def read_ranges(ranges: Sequence[tuple[Path, int, int]]) -> list[bytes]:
    """The bytes [start, stop) of each file behind a URL, asked for together; fewer where the file ends before."""
    urls = [str(url_of(path)) for path, _, _ in ranges]
    with _asking(urls[0]) as (filesystem, _):
        paths = [filesystem._strip_protocol(url) for url in urls]
        return filesystem.cat_ranges(paths, *([each[at] for each in ranges] for at in (1, 2)), on_error="raise")


# --- building ------------------------------------------------------------------------------------------------------


def pull(folder: Path) -> None:
    """Make a mirror show what is finished at its URL: every manifest is fetched, what the URL does not have is dropped."""
    if url_of(folder) is None:
        return
    with _asking(str(url_of(folder))) as (filesystem, root):
        filesystem.invalidate_cache()
        names = [name[len(root) :].lstrip("/") for name in filesystem.find(root)]
        wanted = [name for name in names if name in _TOP_FILES or name.endswith(f"/{MANIFEST}")]
        paths = {f"{root}/{name}": folder / name for name in wanted}
        found = {paths[path]: data for path, data in filesystem.cat(list(paths)).items()} if paths else {}
    tops = [folder / name for name in _TOP_FILES if (folder / name).exists()]
    for path in [*tops, *folder.glob(f"*/**/{MANIFEST}")]:
        if found.get(path) != path.read_bytes():
            path.unlink() if path in tops else shutil.rmtree(path.parent)
    for path, data in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)


def publish(work: Path, folder: Path) -> None:
    """Upload an artifact that will be `folder` and lies in `work`: its manifest last, so that it is whole once it is seen."""
    if url_of(folder) is None:
        return
    for name in (*read_json(work / MANIFEST)["files"], MANIFEST):
        _put(work / name, f"{url_of(folder)}/{name}")


def move(folder: Path, to: Path) -> None:
    """Rename a finished artifact; at a URL it is copied, then removed."""
    present(folder)
    publish(folder, to)
    os.rename(folder, to)
    remove(folder)


def publish_file(path: Path) -> None:
    """Upload a file that belongs to no artifact: the top manifest, a report."""
    if url_of(path) is not None:
        _put(path, str(url_of(path)))


def remove(path: Path) -> None:
    """Delete what a mirrored folder or file stands for at its URL: first the manifest."""
    if url_of(path) is None:
        return
    with _asking(str(url_of(path))) as (filesystem, root):
        filesystem.invalidate_cache()
        if filesystem.exists(f"{root}/{MANIFEST}"):
            filesystem.rm_file(f"{root}/{MANIFEST}")
        if filesystem.exists(root):
            filesystem.rm(root, recursive=True)


# --- the other side ------------------------------------------------------------------------------------------------


def _read(url: str, missing: tuple[type[Exception], ...] = (FileNotFoundError,)) -> bytes | None:
    """A small file; None where there is none, which these errors say."""
    with _asking(url) as (filesystem, root):
        try:
            return filesystem.cat_file(root)
        except missing:
            return None


def _put(file: Path, url: str) -> None:
    with _asking(url) as (filesystem, root):
        protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
        if not protocols & _OBJECT_STORES:
            filesystem.makedirs(root.rpartition("/")[0], exist_ok=True)
        if "file" in protocols:  # the others show a file once it is whole
            filesystem.put_file(str(file), f"{root}.part")
            filesystem.mv(f"{root}.part", root)
        else:
            filesystem.put_file(str(file), root)


@contextlib.contextmanager
def _asking(url: str) -> Iterator[tuple[Any, str]]:
    """The filesystem of a URL and the path in it. What goes wrong is told with the URL.

    Raises:
        InputError: instead of what the filesystem raises, which differs from one to the next.
    """
    import fsspec

    try:
        yield fsspec.core.url_to_fs(url)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{url}: {type(error).__name__}: {error}. Check the URL, the network and the credentials, and that the package "
            "for this protocol is installed (`pip install s3fs` for s3://, gcsfs for gs://)."
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time fetches into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".fetch.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
