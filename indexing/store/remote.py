"""Datastores on object storage: a local folder mirrors a URL, and missing files are fetched.

    s3://bucket/wiki/chunks/00000   ⟷   RETRO_CACHE/s3:/bucket/wiki/chunks/00000

    reading:   present(path): fetched on first use, checked against its artifact's manifest, renamed into place
    building:  create(…) uploads a finished artifact, its manifest last, before it becomes visible here

A path with a part such as `s3:` mirrors the URL that follows, wherever the folder is. So plain paths carry URLs through
the code: `pathlib` turns `s3://bucket` into `s3:/bucket`, and `url_of` reverses it. If the mirror differs from the URL,
the mirror is dropped. For all other paths the functions of this file do nothing. fsspec opens the URLs; it is imported
inside functions.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from indexing.store.checked_files import cache_folder as cache_folder
from indexing.store.checked_files import remember
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST, checksum, files_of, member, read_json, write_bytes

_READ_ON_OPEN = (MANIFEST, "deleted.json")
_TOP_FILES = (*_READ_ON_OPEN, "report.json", "report.html")  # files of a datastore that belong to no artifact
_PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]+:")
# Object stores, where a folder is only a name prefix. Asked to make a folder, s3fs would create a missing bucket, for
# example after a typing error. Without the right to list names, S3 answers "forbidden" for a missing name.
_MISSING = (FileNotFoundError, PermissionError)
# botocore's default of 10 makes the ranges of a batch wait for each other (docs/results/speed.md).
_S3_CONNECTIONS = 64
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "http", "https"}


# --- names ---------------------------------------------------------------------------------------------------------


def url_of(location: Path | str) -> str | None:
    """The URL that a location names or mirrors; None for a local folder."""
    parts = Path(location).parts
    at = next((position for position, part in enumerate(parts) if _PROTOCOL.fullmatch(part)), None)
    if at is None:
        return None
    root = "///" if parts[at] in ("file:", "local:") else "//"
    return parts[at] + root + "/".join(parts[at + 1 :])


def datastore_name(folder: Path) -> str:
    """The name of a datastore for clients: its URL, or the last two parts of its path."""
    return url_of(folder) or "/".join(folder.resolve().parts[-2:])


def local_folder(location: Path | str) -> Path:
    """The local path of a location: itself, or the mirror of its URL in the cache."""
    url = url_of(location)
    return Path(location) if url is None else cache_folder() / Path(url)


def absolute(location: Path | str) -> str:
    """A location that other processes and later runs can use: the URL, or the absolute path."""
    return url_of(location) or str(Path(location).resolve())


def is_away(path: Path) -> bool:
    """True if a file belongs to a URL and has not been fetched."""
    return url_of(path) is not None and not local_folder(path).exists()


# --- reading -------------------------------------------------------------------------------------------------------


def refresh(folder: Path, names: Sequence[str] = _READ_ON_OPEN) -> None:
    """Fetch the manifest and the deletions of a mirrored datastore, or one of them. If the manifest has changed, drop
    artifacts that changed at the URL."""
    if url_of(folder) is None:
        return
    for name in names:
        missing = (FileNotFoundError,) if name == MANIFEST else _MISSING
        data, path = _read(f"{url_of(folder)}/{name}", missing), folder / name
        if data is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != data:
            with _locked(folder):
                if name == MANIFEST:
                    for manifest in [*folder.glob(f"*/**/{MANIFEST}")]:  # list all before removing any
                        is_being_written = manifest.parent.name.startswith(".")
                        if not is_being_written:
                            drop_if_changed(manifest.parent)
                write_bytes(path, data)


def drop_if_changed(folder: Path) -> None:
    """Remove the mirror of an artifact that has changed or is missing at its URL."""
    path = folder / MANIFEST
    if url_of(folder) and path.exists() and _read(f"{url_of(folder)}/{MANIFEST}", _MISSING) != path.read_bytes():
        shutil.rmtree(folder)


def present(path: Path) -> Path:
    """Make a finished artifact, or one of its files, local: fetch it if it belongs to a URL and is missing here.

    Raises:
        InputError: it does not exist, the URL cannot be read, or the file differs from the artifact's manifest.
    """
    if url_of(path) is None:
        return path
    path = local_folder(path)
    if path.is_file():
        return path
    above = path.parents if path.suffix else (path, *path.parents)
    folder = next((parent for parent in above if url_of(parent) and fetch_manifest(parent)), path)
    files = files_of(read_json(folder / MANIFEST), folder) if (folder / MANIFEST).exists() else {}
    names = [name for name in files if (folder / name).is_relative_to(path)]
    if not names:
        raise InputError(f"{url_of(path)} is not part of anything finished. Run `retro index` to make it.")
    for name in names:
        _fetch(folder, name, files[name])
    return path


def fetch_manifest(folder: Path) -> bool:
    """True if a folder has a manifest. If the folder mirrors a URL, the manifest is fetched."""
    path = folder / MANIFEST
    if path.exists() or url_of(folder) is None:
        return path.exists()
    data = _read(f"{url_of(folder)}/{MANIFEST}", _MISSING)
    if data is not None:
        with _locked(folder):
            write_bytes(path, data)
    return data is not None


def _fetch(folder: Path, name: str, expected: dict[str, Any]) -> None:
    file, url = member(folder, name), f"{url_of(folder)}/{name}"
    if file.exists():
        return
    if not file.parent.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{file.parent} is a link out of {folder}, where {url} would be written. Remove the link.")
    with _locked(folder):
        if file.exists():  # another process fetched it
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        try:
            with _asking(url) as (filesystem, root):
                filesystem.get_file(root, str(part))
            actual = {"bytes": part.stat().st_size, "checksum": checksum(part)}
            if actual != expected:
                raise InputError(
                    f"{url} differs from its manifest: it has {actual['bytes']:,} bytes with checksum {actual['checksum']}, "
                    f"expected are {expected['bytes']:,} with {expected['checksum']}. Put the file back, or remove the folder "
                    "that holds the manifest and run the command that made it again."
                )
            os.replace(part, file)
            remember({file: expected["checksum"]})
        finally:
            part.unlink(missing_ok=True)


def read_ranges(ranges: Sequence[tuple[Path, int, int]]) -> list[bytes]:
    """The bytes [start, stop) of each file at a URL, requested together; fewer if the file ends before."""
    urls = [str(url_of(path)) for path, _, _ in ranges]
    with _asking(urls[0]) as (filesystem, _):
        paths = [filesystem._strip_protocol(url) for url in urls]
        return filesystem.cat_ranges(paths, *([piece[at] for piece in ranges] for at in (1, 2)), on_error="raise")


# --- building ------------------------------------------------------------------------------------------------------


def pull(folder: Path) -> None:
    """Update a mirror: fetch every manifest at its URL, and drop what the URL does not have."""
    if url_of(folder) is None:
        return
    with _asking(str(url_of(folder))) as (filesystem, root):
        filesystem.invalidate_cache()
        prefix = root.rstrip("/") + "/"
        names = [name.removeprefix(prefix) for name in filesystem.find(root) if name.startswith(prefix)]
        fetched = [name for name in names if name in _TOP_FILES or name.endswith(f"/{MANIFEST}")]
        paths = {prefix + name: member(folder, name) for name in fetched}
        contents = {paths[path]: data for path, data in filesystem.cat(list(paths)).items()} if paths else {}
    tops = [folder / name for name in _TOP_FILES if (folder / name).exists()]
    for path in [*tops, *folder.glob(f"*/**/{MANIFEST}")]:
        if contents.get(path) != path.read_bytes():
            path.unlink() if path in tops else shutil.rmtree(path.parent)
    for path, data in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)


def publish(work: Path, folder: Path) -> None:
    """Upload the artifact in `work` that will become `folder`, its manifest last, so that others never see it
    incomplete."""
    if url_of(folder) is None:
        return
    for name in (*files_of(read_json(work / MANIFEST), work), MANIFEST):
        _put(work / name, f"{url_of(folder)}/{name}")


def move(folder: Path, to: Path) -> None:
    """Rename a finished artifact; at a URL it is copied, then removed."""
    present(folder)
    publish(folder, to)
    os.rename(folder, to)
    remove(folder)


def publish_file(path: Path) -> None:
    """Upload a file that belongs to no artifact: the datastore's manifest, a report."""
    if url_of(path) is not None:
        _put(path, str(url_of(path)))


def remove(path: Path) -> None:
    """Delete what a mirrored folder or file mirrors at its URL, the manifest first."""
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
    """Read a small file; None if one of the errors `missing` says that there is none."""
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
        if "file" in protocols:  # other protocols show a file only when it is complete
            filesystem.put_file(str(file), f"{root}.part")
            filesystem.mv(f"{root}.part", root)
        else:
            filesystem.put_file(str(file), root)


@contextlib.contextmanager
def _asking(url: str) -> Iterator[tuple[Any, str]]:
    """The filesystem of a URL and the path in it. Errors name the URL."""
    import fsspec

    options = {}
    if url.startswith(("s3:", "s3a:")) and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
        options["config_kwargs"] = {"max_pool_connections": _S3_CONNECTIONS}
    with named_errors(url):
        yield fsspec.core.url_to_fs(url, **options)


@contextlib.contextmanager
def named_errors(url: str, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Work with the filesystem of a URL.

    Raises:
        InputError: in place of the filesystem's exceptions, which differ between filesystems; those in `passed` are
            raised unchanged.
    """
    try:
        yield
    except InputError:
        raise
    except passed:
        raise
    except Exception as error:
        raise InputError(
            f"{url}: {type(error).__name__}: {error}. Check the URL, the network and the credentials, and that the package "
            "for this protocol is installed (`pip install s3fs` for s3://, gcsfs for gs://, huggingface_hub for hf://)."
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time fetch into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".fetch.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
