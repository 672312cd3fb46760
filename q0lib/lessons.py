"""What a mixture says of the training text, kept on disk: for students that read it again.

<cache>/lessons/<what it is of>/p0003.safetensors   one packing of the documents: log p of the whole
                                                    vocabulary at every position, fp16

A lesson of K models costs K passes; read back, it costs none. That pays where a few packings take
turns (`Method.packings`), or where many students of one seed, as in trials, read the same ones.
The exact distribution is kept: its k largest probabilities alone would teach a biased one.
"""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from q0lib import config, corpus, distill, files, paths

MOST_BYTES = 4 << 30  # of a packing: it is written from memory
_ROWS = 8  # a forward pass


class Read:
    """A lesson that was kept, log p [N, V] in fp16."""

    def __init__(self, log_probs: Tensor) -> None:
        self.held = log_probs

    def log_probs(self, part: slice) -> Tensor:
        return self.held[part].float()


class Kept:
    """The lessons of one mixture on one stream of training rows, each packing made when first
    asked for.

    Raises:
        ValueError: a packing's lessons would take more than 4 GiB.
    """

    def __init__(
        self, mixture: distill.Teacher, stream: corpus.EpochStream, teaching: config.Teaching
    ) -> None:
        self.mixture, self.stream = mixture, stream
        vocabulary = mixture.models[0].config.vocab_size
        self.shape = stream.rows_per_epoch, stream.context, vocabulary
        size = 2 * int(np.prod(self.shape))
        if size > MOST_BYTES:
            raise ValueError(
                f"the lessons of one packing would take {size / 2**30:.0f} GiB, at most "
                f"{MOST_BYTES >> 30} are kept: set runtime.cache_lessons=false"
            )
        facts = {
            "teaching": teaching.decides | {"start": None},
            "stream": [stream.split.fingerprint, stream.context, stream.seed],
            "dtype": str(mixture.dtype),
        }
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        self.folder = paths.CACHE / "lessons" / name

    def repeats(self, row: int) -> bool:
        """Whether this row of the stream was read before, in an earlier turn of its packing."""
        epoch = row // self.stream.rows_per_epoch
        return self.stream.packing(epoch) < epoch

    def lesson(self, first: int, rows: int) -> Read:
        """What the mixture says of rows first .. first + rows - 1 of the stream."""
        parts = []
        while rows:
            epoch, start = divmod(first, self.stream.rows_per_epoch)
            taken = min(rows, self.stream.rows_per_epoch - start)
            packing = _opened(self._file(self.stream.packing(epoch)))
            parts.append(torch.from_numpy(packing[start : start + taken].copy()).flatten(0, 1))
            first, rows = first + taken, rows - taken
        return Read(torch.cat(parts).to(self.mixture.models[0].head.weight.device))

    def _file(self, packing: int) -> Path:
        path = self.folder / f"p{packing:04d}.safetensors"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):  # of several students one asks the mixture
                if not path.exists():
                    files.save_tensors(path, {"log_probs": self._asked(packing)})
        return path

    def _asked(self, packing: int) -> Tensor:
        per_epoch, context, vocabulary = self.shape
        kept = torch.empty(per_epoch * context, vocabulary, dtype=torch.float16)
        device = self.mixture.models[0].head.weight.device
        for row in range(0, per_epoch, _ROWS):
            count = min(_ROWS, per_epoch - row)
            block = torch.from_numpy(self.stream.rows(packing * per_epoch + row, count))
            lesson = self.mixture.lesson(block[:, :-1].to(device))
            for at in range(count):
                part = slice(at * context, (at + 1) * context)
                kept[row * context + part.start : row * context + part.stop] = lesson.log_probs(
                    part
                ).half()
        return kept.unflatten(0, (per_epoch, context))


@functools.lru_cache(maxsize=4)
def _opened(path: Path) -> np.ndarray:
    """log p [rows, context, V] of a packing, mapped; checked against its checksum once."""
    place = files.open_tensors(path)[0]["log_probs"]
    return np.memmap(path, place.dtype, "r", place.offset, place.shape)
