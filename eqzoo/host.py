"""Settings of the process, which have to be there when it starts.

On a CPU, the memory of one step goes back to the system at its end, and the next step gets it anew, page by page, each
filled with zeros. Under the settings below glibc keeps it, in large pages, if the program's first thread asks for it:
so that is where the computations start. And XLA takes vectors half as wide as processors with AVX-512 have, if it isn't
told to take whole ones.
"""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
VECTORS = "--xla_cpu_prefer_vector_width"


def tune() -> None:
    """Start this program again, with the same arguments, under the settings with which it computes fastest on a CPU;
    return if it has them, if they don't apply, or if the environment says `EQZOO_HOST=off`.

    They apply with glibc, so on most Linux systems, where JAX has no accelerator to use and the environment has no
    `GLIBC_TUNABLES` of the user's own. For the main part of a script alone, before anything is written or read:

    ```python
    if __name__ == "__main__":
        host.tune()
        main()
    ```
    """
    if os.environ.get("EQZOO_HOST") == "tuned":
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if not _should_restart(os.environ):
        return
    settings = {"GLIBC_TUNABLES": MEMORY, "XLA_FLAGS": _flags(os.environ.get("XLA_FLAGS", ""), _processor())}
    listed = " ".join(f"{name}={value}" for name, value in settings.items() if value)
    print(f"eqzoo: started again with {listed} (EQZOO_HOST=off: don't)", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = os.environ | settings | {"EQZOO_HOST": "tuned"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _should_restart(environment: Mapping[str, str]) -> bool:
    wish = environment.get("EQZOO_HOST", "on")
    if wish not in ("on", "off", "tuned"):
        raise ValueError(f"EQZOO_HOST={wish}: expected `off`, or `on`, which it is without saying so")
    is_free = wish == "on" and "GLIBC_TUNABLES" not in environment
    return is_free and _has_glibc() and _computes_on_cpu(environment)


def _flags(flags: str, processor: str) -> str:
    """The user's flags of XLA, and ours where the processor has such vectors and the user said nothing about them."""
    is_ours = "avx512f" in processor and VECTORS not in flags
    return f"{flags} {VECTORS}=512".strip() if is_ours else flags


def _processor() -> str:
    """What Linux says of it."""
    return Path("/proc/cpuinfo").read_text()


def _has_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _computes_on_cpu(environment: Mapping[str, str]) -> bool:
    """As JAX will decide; asking it would start it."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
