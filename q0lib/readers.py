"""Files become texts: whatever a path names is read literally, as a stream, and nothing is guessed.

A .txt file holds running text and is cut into passages; a .jsonl, .csv or .parquet file holds one
text a row, in one column, and no other column is looked at. All but .parquet may be compressed
(.gz, .zst). A folder is its files, in the order of their paths. What cannot be read is refused with
the file, the line or row, and what to do.
"""

import codecs
import csv
import io
import json
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

# UTF-32 first: its little-endian mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_BLOCK = 1 << 20  # bytes read at a time
_LONG = 8  # a line of more than so many passages is no paragraph, and is cut
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？][”’」』）]*\s*")
_WORD = re.compile(r"\s+")

_Cells = Iterator[tuple[object, str]]  # what stands in the text column, and where that is


def documents(source: Path, column: str, chars: int) -> Iterator[str]:
    """The texts of a file, or of all files of a folder; blank ones are dropped.

    `column` is the text's in files of rows; running text is cut into passages of at least `chars`
    characters.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a file of another kind, damaged, not in UTF-8 (or UTF-16 or UTF-32 with a
            byte-order mark), without the column, or with a row that is no text.
    """
    chosen = files(source)
    if others := [path.name for path in _visible(source) if not _kind(path)]:
        warnings.warn(
            f"{source}: {len(others)} files of other kinds are not read ({reprlib.repr(others)})",
            stacklevel=2,
        )
    for path in chosen:
        if _kind(path) == ".txt":
            yield from cut_passages(_lines(path), chars)
        else:
            yield from texts(_ROWS[_kind(path)](path, column), column)


def files(source: Path) -> list[Path]:
    """The files that `source` names: itself, or those of a folder and its folders, sorted by path.

    Hidden files and files of other kinds are left out.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a file of another kind, or a folder without one that can be read.
    """
    if not source.exists():
        raise FileNotFoundError(f"there is no file or folder {str(source)!r}")
    found = [path for path in _visible(source) if _kind(path)]
    if not found:
        raise ValueError(
            f"{source} must be, or hold, .txt, .jsonl, .csv (each also as .gz or .zst) or "
            ".parquet files"
        )
    return found


def _visible(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    inside = (path for path in source.rglob("*") if path.is_file())
    return sorted(p for p in inside if not re.search(r"(^|/)\.", p.relative_to(source).as_posix()))


def _kind(path: Path) -> str:
    """`.txt`, `.jsonl`, `.csv`, `.parquet`, or nothing."""
    *rest, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    if last in _COMPRESSION:
        return rest[-1] if rest[-1] in (".txt", ".jsonl", ".csv") else ""
    return last if last == ".txt" or last in _ROWS else ""


def texts(cells: _Cells, column: str) -> Iterator[str]:
    """What is text of `cells`, each with where it stands; nulls and blank texts are dropped.

    Raises:
        ValueError: a cell that is no text.
    """
    for cell, where in cells:
        if cell is not None and not isinstance(cell, str):
            raise ValueError(f"{where}: column {column!r} must hold text, got {reprlib.repr(cell)}")
        if cell and cell.strip():
            yield cell


# --- running text ------------------------------------------------------------------------------


def cut_passages(lines: Iterable[str], chars: int) -> Iterator[str]:
    """Cut running text at the ends of its lines into passages of at least `chars` characters.

    A short rest joins the passage before it. A line of more than `_LONG` times `chars` is cut
    too: where a sentence ends, or else a word, or else anywhere. Nothing but blank space at the
    cuts is lost.
    """
    last, current = "", ""
    for line in lines:
        for part in filter(None, map(str.strip, _pieces(line.strip(), chars))):
            current = f"{current}\n{part}" if current else part
            if len(current) >= chars:
                if last:
                    yield last
                last, current = current, ""
    if rest := "\n".join(filter(None, (last, current))):
        yield rest


def _pieces(line: str, chars: int) -> Iterator[str]:
    start = 0
    if len(line) > _LONG * chars:
        while len(line) - start > 2 * chars:
            window = start + chars, start + 2 * chars
            end = _SENTENCE.search(line, *window) or _WORD.search(line, *window)
            stop = end.end() if end else window[1]
            yield line[start:stop]
            start = stop
    yield line[start:]


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, decompressed and decoded, without their ends."""
    number, position = 0, 0
    parts: list[str] = []  # of a line that goes on in the next block
    try:
        compression = _COMPRESSION.get(path.suffix.lower())
        # Opened here, not by name in Arrow, which takes a ~ for the home.
        with path.open("rb") as file, pyarrow.input_stream(file, compression) as stream:
            block = stream.read(_BLOCK)
            mark = next(filter(block.startswith, _MARKS), b"")
            if not mark and block.count(0) * 4 > len(block):
                raise ValueError(
                    f"{path} is not UTF-8: many of its bytes are 0, as in UTF-16 without a "
                    "byte-order mark; convert it (iconv -f UTF-16LE -t UTF-8)"
                )
            encoding = _MARKS.get(mark, "utf-8")
            decoder = io.IncrementalNewlineDecoder(
                codecs.getincrementaldecoder(encoding)(), translate=True
            )
            start = len(mark)
            while True:
                position += len(block)
                first, *later = decoder.decode(block[start:], final=not block).split("\n")
                parts.append(first)
                for after in later:
                    number += 1
                    yield "".join(parts)
                    parts = [after]
                if not block:
                    break
                block, start = stream.read(_BLOCK), 0
    except UnicodeDecodeError as error:
        byte = position - len(error.object) + error.start
        line = number + 1 + error.object[: error.start].decode(encoding).count("\n")
        raise ValueError(
            f"{path}, line {line}: byte {byte} (0x{error.object[error.start]:02x}) is not "
            f"{encoding.upper()}; convert the file (iconv -f LATIN1 -t UTF-8, if it is Latin-1)"
        ) from error
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read after line {number}: {error}") from error
    yield "".join(parts)


# --- rows --------------------------------------------------------------------------------------


def _jsonl(path: Path, column: str) -> _Cells:
    columns: dict[str, None] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no JSON object, one to a line: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no JSON object, one to a line: {reprlib.repr(row)}")
        columns |= dict.fromkeys(row)
        yield row.get(column), where
    if columns and column not in columns:  # a row may lack the column, the file may not
        raise _no_column(column, path, columns)


def _csv(path: Path, column: str) -> _Cells:
    csv.field_size_limit((1 << 31) - 1)  # by default a text may have 131,072 characters
    rows = csv.reader((f"{line}\n" for line in _lines(path)), strict=True)
    try:
        header = next(rows, [])
        if header and column not in header:
            raise _no_column(column, path, header)
        place = header.index(column) if header else 0
        for row in filter(None, rows):
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise ValueError(f"{where} has {len(row)} fields, the header has {len(header)}")
            yield row[place], where
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num} is no CSV: {error}") from error


def _parquet(path: Path, column: str) -> _Cells:
    number = 0
    try:
        with path.open("rb") as opened:
            file = pyarrow.parquet.ParquetFile(opened)
            if column not in file.schema_arrow.names:
                raise _no_column(column, path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for cell in batch.column(column):
                    text = cell.as_py()
                    number += 1
                    yield text, f"{path}, row {number}"
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read after row {number}: {error}") from error


def _no_column(column: str, where: object, columns: Iterable[str]) -> ValueError:
    return ValueError(f"no column {column!r} in {where}, it has: {', '.join(columns)}")


_ROWS: dict[str, Callable[[Path, str], _Cells]] = {
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
