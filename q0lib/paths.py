"""The study's folders, and the one way files come to be in them: whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(os.environ.get("Q0_ROOT") or Path(__file__).resolve().parent.parent)
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
DATA = ROOT / "data"
PUBLISHED = DATA / "published"
RESULTS = DATA / "results"
CACHE = DATA / "cache"
RUNS = DATA / "runs"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; on success rename it to `target`, else remove it.

    The temporary may become a file or a folder. A reader therefore sees the old `target`, or the
    new one complete, and never half of it, whatever happens to the writer.

    Raises:
        OSError: as the writer met it (a full disk, say); `target` is then as it was.
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
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` as UTF-8, whole or not at all."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
