"""Messages about files that cannot be read say what they are, and what helps."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import list_files
from indexing.store.errors import InputError
from tests.conftest import build_local, tiny_config
from tests.indexing.corpus.reading import read

CHINESE = "这是一个关于检索的故事，人们在图书馆里有很多的书，他不知道要读哪一本。了解之后，我们就开始了。\n"
JAPANESE = (
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で泣いていた。\n"
)
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 이성과 양심을 부여받았다.\n"
RUSSIAN = "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью.\n"


@pytest.mark.parametrize(("encoding", "name"), [("gbk", "GBK"), ("gb18030", "GBK"), ("utf-16", "UTF-16")])
def test_a_chinese_file_in_another_encoding_is_named_with_the_command_that_converts_it(
    tmp_path: Path, encoding: str, name: str
) -> None:
    (tmp_path / "a.txt").write_bytes((CHINESE * 20).encode(encoding))
    documents, (problem,) = read(tmp_path / "a.txt")
    assert documents == []
    assert problem.kind == "not UTF-8"
    assert f"it looks like {name}; convert it with `iconv -f {name} -t UTF-8 a.txt" in problem.detail


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        (KOREAN, "euc_kr"),
        (RUSSIAN, "cp1251"),
        (CHINESE, "big5"),
        (RUSSIAN, "koi8_r"),
    ],
)
def test_text_in_other_encodings_is_not_called_gbk(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes((text * 20).encode(encoding, errors="ignore"))
    assert "GBK" not in " ".join(problem.detail for problem in read(tmp_path / "a.txt")[1])


def test_a_json_line_in_gbk_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": CHINESE}, ensure_ascii=False).encode("gbk"))
    problems = read(tmp_path / "a.jsonl")[1]
    assert "iconv -f GBK -t UTF-8 a.jsonl" in problems[0].detail


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_wrong_text_column_lists_the_columns_of_the_file(tmp_path: Path, kind: str) -> None:
    rows = {"body": ["one", "two"], "lang": ["en", "en"], "score": [1, 2]}
    if kind == "parquet":
        pq.write_table(pa.table(rows), tmp_path / "d.parquet")
    else:
        (tmp_path / "d.jsonl").write_text(json.dumps({key: values[0] for key, values in rows.items()}) + "\n")
    problem = read(tmp_path / f"d.{kind}")[1][0]
    assert "corpus.text_key = 'text' leads to nothing; keys: body, lang, score" in problem.detail
    with pytest.raises(
        InputError, match=rf"no document with text(.|\n)*d\.{kind}:1: missing text.*keys: body, lang, score"
    ):
        build_local(tiny_config(tmp_path, tmp_path / f"d.{kind}"))


def test_a_glob_below_a_missing_folder_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, said in (
        ("x/*.jsonl", f"{tmp_path}/x does not exist"),
        ("x/y/**/*.txt", f"{tmp_path}/x does not exist"),
        ("file/*.txt", f"{tmp_path}/file is not a folder"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            list_files(CorpusSettings(paths=(str(tmp_path / given),)))
