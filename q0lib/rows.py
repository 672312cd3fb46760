"""Probabilities [M, T] that stay on disk: read a block of tokens at a time, whatever M is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from q0lib.files import Place

HELD = 1 << 26  # probabilities (256 MiB) up to which a population is simply held in memory


class Rows:
    """P[M, T] of members whose log p (fp32, nats) lie in a file each; read-only.

    `rows[members, tokens]` with a slice of tokens reads just that, as probabilities, fp32;
    `rows[i]` is a member's row; `rows[members]` (a slice, mask or indices) is those members' rows,
    unread. `np.asarray(rows)` reads everything.
    """

    ndim, dtype = 2, np.dtype(np.float32)
    block = 1 << 22  # probabilities to read at once: a file is opened for each member and block

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.shape = len(self.places), self.places[0].shape[0]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: Any) -> Any:
        members, tokens = key if isinstance(key, tuple) else (key, None)
        if isinstance(members, int | np.integer):
            return self[[int(members)], slice(None) if tokens is None else tokens][0]
        chosen = np.arange(len(self))[members]
        if tokens is None:
            return Rows([self.places[i] for i in chosen])
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            return self[chosen, :][:, tokens]
        start, stop, _ = tokens.indices(self.shape[1])
        block = np.empty((len(chosen), max(stop - start, 0)), self.dtype)
        for row, i in zip(block, chosen, strict=True):
            np.exp(self.places[i].read(start, stop), out=row)
        return block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:, :], dtype=dtype)


def probabilities(places: Sequence[Place]) -> "np.ndarray | Rows":
    """P[M, T] of these members: an array where it is small, else `Rows` that read as asked."""
    rows = Rows(places)
    return np.asarray(rows) if rows.shape[0] * rows.shape[1] <= HELD else rows
