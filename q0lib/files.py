"""The one way files come to be here: whole or not at all, and known by their content."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
