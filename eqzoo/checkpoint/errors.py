"""What the checkpoint readers raise."""

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not fit the model."""


def listing(names: Sequence[object]) -> str:
    """The names as an error message shows them: quoted, and cut short where there are many."""
    shown = ", ".join(f"{str(name)[:100]!r}" for name in names[:10])
    return (shown or "nothing") + (f" and {len(names) - 10} more" if len(names) > 10 else "")
