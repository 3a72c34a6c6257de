"""Ending a run in order when somebody asks for it."""

import os
import signal
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils


class Stop:
    """Within it, SIGTERM (which clusters send before they take the machine) and Ctrl-C don't end the program at once:
    after the step, `requested` says that it is time to save and leave the loop. A second Ctrl-C interrupts as usual.

    If there are several processes, a signal to any of them makes all stop after the same step. All must call
    `requested` after every step for that, and `jax.distributed.initialize()` comes before.

    ```python
    with Stop() as stop:
        for step in range(1, 4):
            if stop.requested(step):
                break
    ```
    """

    def __init__(self):
        self._is_asked = False

    def __enter__(self) -> "Stop":
        # JAX has its own handler of SIGTERM then, which tells the other processes.
        self._is_together = jax.process_count() > 1
        signals = (signal.SIGINT,) if self._is_together else (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._ask) for number in signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after this step."""
        if not self._is_together:
            return self._is_asked
        is_reached = multihost_utils.reached_preemption_sync_point(step)
        if is_reached and not self._is_asked:
            self._say(f"asked to stop: step {step} was the last one, saving")
        return is_reached

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            return
        self._is_asked = True
        name = signal.Signals(number).name
        self._say(f"{name}: finishing this step, saving; Ctrl-C stops at once")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_together:
            os.kill(os.getpid(), signal.SIGTERM)

    @staticmethod
    def _say(text: str) -> None:
        os.write(2, f"\n{text}\n".encode())  # to stderr; a `print` may be what the signal has interrupted
