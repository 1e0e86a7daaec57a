"""`retro verify` names every damaged part of a datastore and no intact one."""

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from indexing.store.artifact import fingerprint
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from indexing.store.files import checksum, read_json, write_checked
from indexing.verification.contents import check_deleted, ids_of, wrong_neighbors
from indexing.verification.datastore import Verified, repair, verify_datastore
from tests.conftest import build_local, contents, tiny_config


def verify(folder: Path) -> Verified:
    return verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None))


def lines(folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in verify(folder).problems]


@pytest.fixture
def folder(tmp_path, tiny_datastore: Datastore) -> Path:
    """A copy of the tiny datastore, with its times, to damage."""
    return shutil.copytree(tiny_datastore.folder, tmp_path / "datastore")


def flip(path: Path, place: float = 0.5) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))


def edit(path: Path, change: Callable[[dict], None]) -> None:
    value = read_json(path)
    change(value)
    write_checked(path, value)


def rewrite(folder: Path, artifact: str, file: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Change an array and its manifest as a faulty program would, so that checksums stay correct."""
    path = folder / artifact / file
    array = np.load(path)
    changed = change(array)
    np.save(path, array if changed is None else changed)
    told = {"bytes": path.stat().st_size, "checksum": checksum(path)}
    edit(folder / artifact / "manifest.json", lambda manifest: manifest["files"].update({file: told}))


def test_intact_datastore_has_no_problems_and_is_not_changed(folder) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    found = verify(folder)
    assert found.problems == ()
    shards = len(Datastore.open(folder).train.chunk_rows)
    assert found.artifacts == 5 + 5 * shards
    assert found.stages == ("chunk", "embed", "train-index", "add", "sparse", "neighbors")
    assert found.bytes == sum(
        path.stat().st_size for path in folder.glob("*/**/*") if path.is_file() and path.name != "manifest.json"
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_materialized_neighbors_are_verified(tmp_path, folder, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    config = replace(config, datastore=folder, neighbors=replace(config.neighbors, materialized=3))
    build_local(config)
    assert verify(folder).problems == ()
    assert verify(folder).stages[-1] == "materialize"
    for change, file, words in (
        (lambda a: a[:, :2], "lengths.npy", "instead of"),
        (lambda a: np.put(a, 4, 33), "lengths.npy", "holds length 33, more than 32"),
        (lambda a: np.put(a, 0, 0), "lengths.npy", "neighbors instead of"),
        (lambda a: np.put(a, 0, 60_000), "tokens.npy", "holds token 60000"),
    ):
        before = contents(folder)
        rewrite(folder, "materialized/00001", f"train/{file}", change)
        found = lines(folder)
        assert len(found) == 1, found
        assert found[0].startswith(f"materialized/00001/train/{file}")
        assert words in found[0]
        for name, data in before.items():
            (folder / name).write_bytes(data)
    edit(folder / "materialized" / "00001" / "manifest.json", other_neighbors)
    assert "materialized/00001 was made from another 'neighbors'" in lines(folder)[0]
    assert repair(folder, verify(folder)) == ["materialized/00001"]
    build_local(config)
    assert {name: data for name, data in contents(folder).items() if name in before} == before


def other_neighbors(manifest: dict) -> None:
    manifest["recipe"]["inputs"]["neighbors"] = "0" * 16
    manifest["fingerprint"] = fingerprint(manifest["recipe"])


def test_url_is_refused() -> None:
    with pytest.raises(InputError, match=r"s3://bucket/wiki: .*Copy the datastore"):
        verify(Path("s3://bucket/wiki"))


@pytest.mark.slow
def test_one_changed_byte_is_reported_only_for_its_file(folder, tiny_datastore) -> None:
    files = sorted(path for path in folder.glob("*/**/*") if path.is_file() and path.name != "manifest.json")
    files = [path for path in files if path.stat().st_size and not re.search("0000[2-9]", str(path))]
    assert len(files) > 30
    for path in files:
        whole, times = path.read_bytes(), path.stat()
        flip(path)
        name = path.relative_to(folder).as_posix()
        # Bit rot does not change the time. Changes with a new time also invalidate later artifacts (tested below).
        shutil.copystat(tiny_datastore.folder / name, path)
        found = lines(folder)
        assert len(found) == 1, (name, found)
        assert found[0].startswith(f"{name} has changed since it was written (checksum): remove ")
        path.write_bytes(whole)
        shutil.copystat(tiny_datastore.folder / name, path)
        assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert lines(folder) == []


@pytest.mark.slow
def test_changed_byte_in_any_manifest_is_found(folder) -> None:
    for path in sorted(folder.rglob("manifest.json")):
        whole = path.read_text()
        values = re.sub(
            r"[0-9a-f]{16,}", lambda match: match[0][::-1], whole, count=1
        )  # the first fingerprint or checksum
        for text in (values, whole[: len(whole) // 2]):
            path.write_text(text)
            assert verify(folder).problems, path
            path.write_text(whole)
    assert lines(folder) == []


def test_missing_short_and_unfinished_files_are_distinguished(folder) -> None:
    (folder / "chunks/00001/train/lengths.npy").unlink()
    (folder / "index/tuned/tuned.json").write_text("{")
    shutil.rmtree(folder / "embeddings/00002")
    (folder / "neighbors/00003/manifest.json").unlink()
    assert lines(folder) == [
        "chunks/00001/train/lengths.npy is missing: remove chunks/00001 (--repair does), and `retro index CONFIG` makes it again.",
        "embeddings/00002 is not finished: embeddings/00002/manifest.json is missing: `retro index CONFIG` makes it again.",
        f"index/tuned/tuned.json has 1 bytes instead of {read_json(folder / 'index/tuned/manifest.json')['files']['tuned.json']['bytes']}: "
        "remove index/tuned (--repair does), and `retro index CONFIG` makes it again.",
        "neighbors/00003 is not finished: neighbors/00003/manifest.json is missing: remove neighbors/00003 (--repair does), and "
        "`retro index CONFIG` makes it again.",
    ]


def test_repair_also_removes_artifacts_built_from_changed_data(tmp_path, tiny_corpus, tiny_datastore) -> None:
    """A byte changes between two stages. The second stage has correct checksums, but wrong data."""
    config = tiny_config(tmp_path, tiny_corpus)
    build_local(config, only="chunk")
    victim = config.datastore / "chunks/00001/train/tokens.npy"
    rewritten = np.load(victim)
    rewritten[3:30] = rewritten[50:77]
    with open(victim, "r+b") as file:
        file.seek(128)
        file.write(rewritten.tobytes())
    build_local(config)
    assert contents(config.datastore) != contents(tiny_datastore.folder)
    found = verify(config.datastore)
    assert str(found.problems[0]).startswith(f"{victim} has changed")
    assert {problem.artifact for problem in found.problems} >= {
        "chunks/00001",
        "embedder",
        "embeddings/00001",
        "index/tuned",
    }
    assert "corpus" not in (removed := repair(config.datastore, found))
    assert "chunks/00000" not in removed
    build_local(config)
    assert contents(config.datastore) == contents(tiny_datastore.folder)
    assert verify(config.datastore).problems == ()


def test_artifact_of_another_build_is_found_by_its_fingerprint(tmp_path, folder, tiny_corpus) -> None:
    config = tiny_config(tmp_path / "other", tiny_corpus)
    other = build_local(replace(config, embedder=replace(config.embedder, dimension=16))).folder
    shutil.rmtree(folder / "embeddings/00001")
    shutil.copytree(other / "embeddings/00001", folder / "embeddings/00001")
    shutil.rmtree(folder / "chunks/00002")
    shutil.copytree(other / "chunks/00003", folder / "chunks/00002")
    assert [line.partition(":")[0] for line in lines(folder)] == [
        "chunks/00002 holds shard 3",
        "embeddings/00001 was made from another 'embedder' than the existing one",
    ]


def test_manifest_of_the_datastore_is_compared_with_the_shards(folder) -> None:
    def change(manifest) -> None:
        manifest["splits"]["valid"]["chunks"][2] += 1
        manifest["fingerprints"]["embed"] = "0" * 16
        manifest["pad_id"] += 1

    edit(folder / "manifest.json", change)
    found = lines(folder)
    assert len(found) == 3
    assert all(
        line.startswith("manifest.json ") and line.endswith("`retro index CONFIG` writes it again.") for line in found
    )
    assert repair(folder, verify(folder)) == []


CONTENTS = {
    "tokens of another shape": ("chunks/00001", "train/tokens.npy", lambda a: a[:-1], r"has shape \(\d+, 16\) instead of"),
    "tokens of another dtype": ("chunks/00001", "train/tokens.npy", lambda a: a.astype(np.int64), "dtype int64 instead of"),
    "unknown token": ("chunks/00001", "train/tokens.npy", lambda a: np.put(a, 99, 60_000), "holds token 60000"),
    "length 0": ("chunks/00001", "train/lengths.npy", lambda a: np.put(a, 9, 0), "not between 1 and 16"),
    "offsets that fall": ("chunks/00001", "train/documents.npy", lambda a: a[[0, 2, 1, *range(3, len(a))]], "does not rise"),
    "offsets that end early": ("chunks/00001", "train/documents.npy", lambda a: np.put(a, -1, a[-1] - 1), "does not rise"),
    "not a number": ("embeddings/00002", "train.npy", lambda a: np.put(a, 77, np.nan), "not finite"),
    "embeddings of another shape": ("embeddings/00002", "valid.npy", lambda a: a[:, :-1], "instead of"),
    "id beyond the last": ("neighbors/00000", "train/ids.npy", lambda a: np.put(a, 7, 10**6), "row 1: id 1000000 is not in"),
    "id of another datastore": ("neighbors/00000", "valid/ids.npy", lambda a: np.put(a, 0, 1 << 40), "is not in the retrieval"),
    "id below -1": ("neighbors/00000", "valid/ids.npy", lambda a: np.put(a, 0, -2), "id -2 is not in the retrieval set"),
    "own document": ("neighbors/00001", "train/ids.npy", lambda a: np.put(a, 6, 706), "own document"),
    "distance without id": ("neighbors/00001", "train/ids.npy", lambda a: np.put(a, 6, -1), "do not agree"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTENTS)
def test_array_with_wrong_contents_is_named_with_the_reason(folder, case) -> None:
    artifact, file, change, words = CONTENTS[case]
    rewrite(folder, artifact, file, change)
    found = lines(folder)
    assert len(found) == 1, found
    assert found[0].startswith(f"{artifact}/{file}")
    assert re.search(words, found[0]), found


def test_index_with_missing_or_wrong_ids_is_found(folder, tiny_datastore) -> None:
    train = tiny_datastore.train
    for shift, rows, words in ((1, None, "does not hold the ids from"), (0, -1, "vectors instead of")):
        path = folder / "index/00001/vectors.faiss"
        index = faiss.read_index(str(tiny_datastore.folder / "index/trained/trained.faiss"))
        vectors = np.asarray(train.embeddings.shard(1)[:rows], dtype=np.float32)
        index.add_with_ids(vectors, np.arange(len(vectors)) + int(train.tokens.starts[1]) + shift)
        faiss.write_index(index, str(path))
        told = {"bytes": path.stat().st_size, "checksum": checksum(path)}
        edit(
            folder / "index/00001/manifest.json",
            lambda manifest, told=told: manifest["files"].update({"vectors.faiss": told}),
        )
        found = lines(folder)
        assert len(found) == 1
        assert words in found[0]


@pytest.mark.parametrize("kind", ["chunks", "passages"])
def test_inverted_lists_of_other_chunks_are_found(folder, kind) -> None:
    """The lists of another shard."""
    suffixes = ("idx", "term", "fieldnorm", "fast")
    made = {f"{kind}-0.{suffix}": (folder / f"sparse/00002/{kind}-0.{suffix}").read_bytes() for suffix in suffixes}
    for file, data in made.items():
        path = folder / "sparse/00001" / file
        path.write_bytes(data)
        told = {"bytes": path.stat().st_size, "checksum": checksum(path)}
        edit(
            folder / "sparse/00001/manifest.json",
            lambda manifest, file=file, told=told: manifest["files"].update({file: told}),
        )
    (found,) = lines(folder)
    assert found.startswith("sparse/00001 does not hold the chunks from")


def test_borders_of_passages_of_other_chunks_are_found(folder) -> None:
    rewrite(folder, "sparse/00001", "passages.npy", lambda borders: np.add(borders, 1, out=borders))
    (found,) = lines(folder)
    assert found.startswith("sparse/00001/passages.npy does not divide the chunks from")


@pytest.mark.parametrize("key", ["IVF8,Flat", "IVF8,PQ8x4fs", "PCA8,IVF8,SQ8", "Flat"])
def test_ids_are_read_from_every_kind_of_index(key) -> None:
    vectors = np.random.default_rng(0).normal(size=(700, 16)).astype(np.float32)
    index = faiss.index_factory(16, key)
    index = faiss.IndexIDMap2(index) if key == "Flat" else index
    index.train(vectors)
    ids = np.random.default_rng(1).permutation(10**12 + np.arange(700))
    index.add_with_ids(vectors, ids)
    assert np.array_equal(np.sort(ids_of(index)), np.sort(ids))


def test_neighbors_in_another_datastore_are_verified_there(tmp_path, tiny_corpus, tiny_datastore) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    other = shutil.copytree(tiny_datastore.folder, tmp_path / "other")
    embedder = replace(config.embedder, path=str(other))
    tokenizer = replace(config.tokenizer, kind="sentencepiece", path=str(other / "tokenizer" / "sentencepiece.model"))
    extra = replace(config.neighbors, extra_datastores=(other,))
    datastore = build_local(replace(config, embedder=embedder, tokenizer=tokenizer, neighbors=extra))
    assert verify(datastore.folder).problems == ()
    last = (1 << 40) + tiny_datastore.train.num_chunks
    rewrite(datastore.folder, "neighbors/00000", "train/ids.npy", lambda a: np.put(a, 0, last))
    assert [problem.artifact for problem in verify(datastore.folder).problems] == ["neighbors/00000"]
    other.rename(tmp_path / "moved")
    (problem,) = verify(datastore.folder).problems
    assert "cannot be opened" in str(problem)
    assert repair(datastore.folder, verify(datastore.folder)) == []


def test_other_folder_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="is not a datastore"):
        verify(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wrong_neighbors_names_the_first_row(tiny_datastore) -> None:
    split = tiny_datastore.train
    ids, distances = split.neighbor_ids.read(0, 50).copy(), split.neighbor_distances.read(0, 50).copy()
    num_chunks = np.array([split.num_chunks])
    assert wrong_neighbors(ids, distances, split, 0, num_chunks) is None
    ids[31, 2] = 31  # the chunk itself
    assert wrong_neighbors(ids, distances, split, 0, num_chunks) == (31, "id 31 is of the chunk's own document")


def test_fingerprint_of_a_stage_is_computed_from_its_shards(tiny_datastore) -> None:
    """`_joint` relies on these properties of the stage table."""
    prints = [read_json(path)["fingerprint"] for path in sorted(tiny_datastore.folder.glob("chunks/*/manifest.json"))]
    assert tiny_datastore.manifest["fingerprints"]["chunk"] == fingerprint(prints)


def test_any_flipped_bit_of_deleted_documents_is_found(folder) -> None:
    datastore = Datastore.open(folder)
    assert list(check_deleted(datastore)) == []
    delete_documents(folder, [row["id"] for row in datastore.train.metadata([1, 5, 100])])
    assert list(check_deleted(datastore)) == []
    path = folder / "deleted.json"
    whole = path.read_bytes()
    changed = [
        bytes(a ^ (1 << bit) * (n == at) for n, a in enumerate(whole)) for at in range(len(whole)) for bit in (0, 3, 5)
    ]
    missed = []
    for data in (*changed, whole[:-1], whole[:50], b"", whole + b"x"):
        path.write_bytes(data)
        try:
            found = list(check_deleted(datastore))
        except InputError as error:
            found = [str(error)]
        if not any(line.startswith(str(path)) and "retro delete" in line for line in found):
            missed.append(data)
    assert missed == []
