"""Where a trajectory goes on: its state on disk, whole or not at all, and read back checked.

<run>/t00/checkpoint.pt           the last good state
<run>/t00/checkpoint-further.pt   of an earlier, longer training, while lost members are made
                                  again; gone when they are
"""

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from q0lib import files


class Checkpoint:
    """The checkpoint files of one trajectory's folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.further = folder / "checkpoint.pt", folder / "checkpoint-further.pt"

    def save(self, state: dict[str, Any], under: str) -> None:
        """Keep `state` (tensors and plain values), and `under` which runtime it was reached."""
        with files.replacing(self.path) as temporary:
            torch.save({**state, "runtime": under}, temporary)

    def newest(
        self, device: torch.device, under: str, reached: Callable[[int], bool]
    ) -> dict[str, Any] | None:
        """The furthest state whose `reached(cycles)` members are there; None to start afresh.

        A state that is further than the members is put aside: when they have been trained again,
        to the same bits, a longer run goes on from it.

        Raises:
            ValueError: a file that cannot be read; names it.
        Warns:
            UserWarning: the state was reached under another runtime than `under`.
        """
        there = [path for path in (self.path, self.further) if path.exists()]
        states = [self._read(path, device) for path in there]
        states = [state for state in states if reached(state["cycle"])]
        if not states:
            if there == [self.path]:
                self.path.replace(self.further)
            return None
        state = max(states, key=lambda state: (state["cycle"], state["step"]))
        if state["runtime"] != under:
            warnings.warn(
                f"{self.path.parent} goes on under {under}, it was begun under "
                f"{state['runtime']}: the result will differ in the last bits",
                stacklevel=3,
            )
        return state

    def finish(self, cycle: int, device: torch.device, *, longer: bool) -> None:
        """Forget what nothing goes on from: all of it, unless `longer` runs may, and what was put
        aside once `cycle` has caught up with it."""
        if not longer:
            self.path.unlink(missing_ok=True)
        if self.further.exists() and self._read(self.further, device)["cycle"] <= cycle:
            self.further.unlink()

    @staticmethod
    def _read(path: Path, device: torch.device) -> dict[str, Any]:
        try:
            with zipfile.ZipFile(path) as parts:  # torch.load does not look at its checksums
                damaged = parts.testzip()
            if not damaged:
                return torch.load(path, map_location=device, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read ({type(error).__name__}); delete it and rerun"
            ) from error
        raise ValueError(f"{path} is not what was written there; delete it and rerun")
