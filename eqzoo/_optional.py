"""Packages that only some functions need."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(purpose: str, extra: str = "train") -> Iterator[None]:
    """Around the imports: if one of them is not installed, say what it is for and how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} needs {error.name}: pip install 'eqzoo[{extra}]'", name=error.name
        ) from error
