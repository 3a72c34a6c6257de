"""Files that appear under their name only once they are complete and on disk."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its place when the block ends well and goes away otherwise."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} does not exist; create it before writing {path.name} there.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors would have its files read by nobody else
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
