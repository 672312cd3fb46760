"""Files to texts: read as they are, literally and in order, or refused with file and place."""

import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q0lib import readers

SOME = ["One text,\nof two lines.", "Zweiter: ünïcode “文”", "NA", 'a "quoted" third']


def write(path: Path, texts: list[str], encoding: str = "utf-8") -> Path:
    """Write `texts` as the file's kind wants them; a .txt holds them as lines."""
    rows = pd.DataFrame({"id": range(len(texts)), "text": texts})
    kind = next(suffix for suffix in path.suffixes if suffix.lower() not in (".gz", ".zst"))
    if kind == ".parquet":
        rows.to_parquet(path)
        return path
    content = {
        ".txt": "\n".join(text.replace("\n", " ") for text in texts),
        ".jsonl": rows.to_json(orient="records", lines=True, force_ascii=False),
        ".csv": rows.to_csv(index=False, lineterminator="\r\n"),
    }[kind.lower()].encode(encoding)
    if path.suffix.lower() == ".gz":
        content = gzip.compress(content, mtime=0)
    if path.suffix.lower() == ".zst":
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read(path: Path, column: str = "text", chars: int = 4) -> list[str]:
    return list(readers.documents(path, column, chars))


# --- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".txt", ".csv.gz"])
@pytest.mark.parametrize(
    "name", ["a[1]", "a*", "a?", "{a1,b}", "~", "zip::a1", "file:a1", "%61", "$HOME", "-", "é ü"]
)
def test_a_path_is_taken_literally(tmp_path, name, kind):
    for decoy in ("a1", "a", "b"):
        write(tmp_path / f"{decoy}{kind}", ["wrong"] * 2)
    path = write(tmp_path / f"{name}{kind}", ["right"] * 2)
    assert read(path) == ["right"] * 2
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(path.name)):
        read(path)


def test_a_relative_path_that_looks_like_an_address_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("http://host/a.jsonl"), SOME)
    write(Path("~/a.jsonl"), SOME[:1])
    assert read(Path("http://host/a.jsonl")) == SOME
    assert read(Path("~/a.jsonl")) == SOME[:1]


# --- kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", ["", ".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv", ".CSV"])
def test_every_kind_reads_the_same_however_packed_and_marked(tmp_path, kind, encoding, packed):
    path = write(tmp_path / f"a{kind}{packed}", SOME, encoding)
    if kind == ".txt":
        assert "\n".join(read(path)).split("\n") == [text.replace("\n", " ") for text in SOME]
    else:
        assert read(path) == SOME


def test_marks_of_both_byte_orders_are_no_text(tmp_path):
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        (tmp_path / "a.txt").write_bytes("\ufeffwords".encode(encoding))
        assert read(tmp_path / "a.txt") == ["words"]


def test_parquet_reads_the_text_column_alone(tmp_path):
    frame = pd.DataFrame({"body.text": [*SOME, None, " "], "other": [{"deep": [1]}] * 6})
    frame.to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "body.text") == SOME


def test_other_columns_may_come_late_change_and_nest(tmp_path):
    others = [{"a": 1}, {"a": "one"}, {"a": {"b": [None]}}, {"c": 2.5}, {"a": [3], "c": "x"}]
    rows = [{"text": None, **other} for other in others] * 300
    rows += [{"text": f"text {i}", **other} for i, other in enumerate(others)] + [{"a": 0}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert read(path) == [f"text {i}" for i in range(len(others))]


def test_a_csv_text_may_be_long_and_hold_line_ends(tmp_path):
    texts = ["x" * 200_000, 'two\n\nlines, "quoted"', "null", "nan"]
    assert read(write(tmp_path / "a.csv", texts)) == texts


def test_concatenated_archives_are_read_to_the_end(tmp_path):
    for name, content in (("a.txt.gz", gzip.compress(b"four\n") + gzip.compress(b"five\n")),
                          ("a.txt.zst", b"".join(pyarrow.compress(text, "zstd", asbytes=True)
                                                 for text in (b"four\n", b"five\n")))):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) == ["four", "five"]


def test_a_folder_is_its_files_in_the_order_of_their_paths(tmp_path):
    for name in ("b/2.jsonl", "a.csv", "b/1.txt.gz", "c.parquet", ".hidden/x.txt", ".y.txt"):
        write(tmp_path / "my [text]" / name, [name] * 2)
    assert read(tmp_path / "my [text]") == [
        name for name in ("a.csv", "b/1.txt.gz", "b/2.jsonl", "c.parquet") for _ in range(2)
    ]


def test_what_a_folder_holds_besides_is_said(tmp_path):
    write(tmp_path / "a.txt", ["text"])
    (tmp_path / "b.pdf").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"1 files of other kinds are not read \(\['b\.pdf'\]\)"):
        assert read(tmp_path) == ["text"]


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "é\nüber\n".encode("latin-1"), r"line 1: byte 0 \(0xe9\) is not UTF-8; convert"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', r"line 2: byte 24 \(0xe9\) is not UTF-8"),
        ("a.csv", b"text\nfine\ncut \xe2\x82", r"line 3: byte 14 \(0xe2\) is not UTF-8"),
        ("a.txt", b"\xef\xbb\xbfab\xff", r"line 1: byte 5 \(0xff\) is not UTF-8"),
        ("a.txt", b"\xff\xfea\0\n\0b\0\0\xd8", r"line 2: byte 8 \(0x00\) is not UTF-16-LE"),
        ("a.txt", "no mark".encode("utf-16-le"), "many of its bytes are 0, as in UTF-16 without"),
        ("a.jsonl", b'{"text": "a"}\n{not json', "line 2 is no JSON object, one to a line"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]', r"line 3 is no JSON object.*\['b'\]"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}', "line 2: column 'text' must hold text, got 3"),
        ("a.jsonl", b'{"body": "a"}\n{"id": 3}', "no column 'text' in .*it has: body, id"),
        ("a.csv", b"id;text\n1;a\n", "no column 'text' in .*it has: id;text"),
        ("a.csv", b'id,text\n1,"a\nb"\n2\n', "line 4 has 1 fields, the header has 2"),
        ("a.csv", b'text\n"a" b\n', "line 2 is no CSV: "),
        ("a.parquet", b"PAR1 not", "cannot be read after row 0: "),
        (
            "a.txt.gz",
            gzip.compress(bytes(range(65, 91)) * 9, mtime=0)[:-9],
            "cannot be read after line 0: ",
        ),
        ("a.txt.gz", b"no archive", "cannot be read after line 0: "),
        ("a.pdf", b"", r"must be, or hold, \.txt, \.jsonl, \.csv"),
        ("a.parquet.gz", b"", "must be, or hold"),
        ("a.gz", b"", "must be, or hold"),
        (".txt/a.md", b"", "must be, or hold"),
    ],
)
def test_refusals_name_the_file_the_place_and_the_cause(tmp_path, name, content, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name == ".txt/a.md":  # a folder with nothing to read
        path = path.parent
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_parquet_row_that_is_no_text_is_named(tmp_path):
    odd = pyarrow.array([b"fine", None, b"\xff"]).view(pyarrow.string())
    for cells, words in ((odd, "cannot be read after row 2"),
                         (pyarrow.array([None, 4.5]), "row 2: .* got 4.5")):  # fmt: skip
        pyarrow.parquet.write_table(pyarrow.table({"text": cells}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=rf"a\.parquet,? {words}"):
            read(tmp_path / "a.parquet")


# --- running text ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.text("aé文\U0001f600\r\n ", max_size=60),
    st.integers(1, 9),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_lines_are_the_same_wherever_blocks_end(tmp_path_factory, text, block, encoding):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK", block + 3)  # a block holds a mark whole
        lines = list(readers._lines(path))
    assert lines == text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


@given(st.integers(0, 40), st.integers(4, 50))
def test_a_wrong_byte_is_found_wherever_blocks_end(tmp_path_factory, before, block):
    path = tmp_path_factory.mktemp("bytes") / "a.txt"
    good = ("é文\n" * before).encode()
    path.write_bytes(good + b"\xff tail")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK", block)
        with pytest.raises(ValueError, match=rf"line {before + 1}: byte {len(good)} \(0xff\)"):
            read(path)


@given(st.lists(st.text("ab \n", max_size=30), max_size=20), st.integers(1, 40))
def test_cutting_paragraphs_loses_nothing(paragraphs, chars):
    text = "\n".join(paragraphs)
    passages = list(readers.cut_passages(text.split("\n"), chars))
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(len(passage) >= chars for passage in passages) or len(passages) == 1


@given(st.lists(st.text("ab.!”", min_size=1, max_size=9), max_size=300), st.integers(9, 40))
def test_a_text_in_one_line_is_cut_between_words_and_at_sentences(words, chars):
    passages = list(readers.cut_passages([" ".join(words)], chars))
    assert " ".join(passages).split() == words
    assert all(len(passage) >= chars for passage in passages) or len(passages) == 1
    if len(" ".join(words)) > 8 * chars:
        assert max(map(len, passages)) <= 4 * chars
        for passage in passages[:-1]:  # where a sentence could end, one does
            window = passage[chars:]
            assert not re.search(r"[.!][”]* ", window) or re.search(r"[.!]”*$", passage)


def test_text_without_sentences_is_cut_between_words():
    words = ["unpunctuated", "words"] * 50
    passages = list(readers.cut_passages([" ".join(words)], 21))
    assert " ".join(passages).split() == words
    assert max(map(len, passages)) <= 2 * 21


def test_unbroken_text_is_cut_at_its_sentences_or_else_anywhere():
    chinese = "今天天气很好。" * 100
    passages = list(readers.cut_passages([chinese], 20))
    assert "".join(passages).replace("\n", "") == chinese
    assert all(passage.endswith("。") for passage in passages)
    assert max(map(len, readers.cut_passages(["x" * 1000], 20))) <= 40


def test_paragraphs_stay_whole_up_to_eight_passages():
    line = "A sentence. " * 13
    assert list(readers.cut_passages([line, line], 20)) == [line.strip()] * 2
    assert len(list(readers.cut_passages([line], 19))) > 2
