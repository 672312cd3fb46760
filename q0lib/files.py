"""The one way files come to be here: whole or not at all, and known by their content."""

import errno
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; on success rename it to `target`, else remove it.

    The temporary may become a file or a folder. A reader therefore sees the old `target`, or the
    new one complete, and never half of it, whatever happens to the writer.

    Raises:
        OSError: the disk is full. This and whatever else the writer raises leave `target` as it
            was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    temporary = scratch / target.name
    try:
        yield temporary
        if temporary.is_file():
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
        os.replace(temporary, target)
    except Exception as error:
        # Some writers wrap what the system said, so that only the disk itself tells.
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if full or shutil.disk_usage(target.parent).free == 0:
            message = f"no space left to write {target}; what was there before is untouched"
            raise OSError(errno.ENOSPC, message) from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` as UTF-8, whole or not at all."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file holds; ValueError with its name and what to do if that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and rerun") from error


class Place(NamedTuple):
    """Where an array lies in a file."""

    path: Path
    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The array, or of a flat one the elements start .. stop - 1, read from disk."""
        size = math.prod(self.shape)
        stop = size if stop is None else min(stop, size)
        kind = np.dtype(self.dtype)
        offset = self.offset + start * kind.itemsize
        found = np.fromfile(self.path, kind, max(stop - start, 0), offset=offset)
        return found.reshape(self.shape) if stop - start == size else found


_DTYPES = {"F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32"}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **about: str) -> None:
    """Write named tensors and a few strings as safetensors, with a checksum of the tensors."""
    held = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    checksum = 0
    for name in sorted(held):
        checksum = zlib.crc32(held[name].numpy().tobytes(), checksum)
    with replacing(path) as temporary:
        save_file(held, temporary, metadata={**about, "crc32": f"{checksum:08x}"})


def open_tensors(path: Path, *, verify: bool = True) -> tuple[dict[str, Place], dict[str, str]]:
    """Where each tensor of a safetensors file lies, and the strings beside them.

    The file is checked against its own header and, with `verify`, against its checksum (if it has
    one), a megabyte at a time: its tensors are not held.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is cut short or damaged; says what to do.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("it is no safetensors file")
            header = file.read(size)
        entries = json.loads(header)
        about = entries.pop("__metadata__", {})
        start = 8 + len(header)
        places = {
            name: Place(path, start + entry["data_offsets"][0], _DTYPES[entry["dtype"]],
                        tuple(entry["shape"]))
            for name, entry in entries.items()
        }  # fmt: skip
        ends = {name: start + entry["data_offsets"][1] for name, entry in entries.items()}
        sound = path.stat().st_size == max(ends.values())
        if sound and verify and "crc32" in about:
            sound = about["crc32"] == f"{_checksum(places, ends):08x}"
    except FileNotFoundError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and rerun") from error
    if not sound:
        raise ValueError(f"{path} is not what was written there; delete it and rerun")
    return places, about


def _checksum(places: Mapping[str, Place], ends: Mapping[str, int]) -> int:
    checksum = 0
    for name in sorted(places):
        with places[name].path.open("rb") as file:
            file.seek(places[name].offset)
            while left := ends[name] - file.tell():
                checksum = zlib.crc32(file.read(min(left, 1 << 20)), checksum)
    return checksum
