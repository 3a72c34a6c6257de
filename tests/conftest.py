"""Settings for the whole run and the processes it starts: 8 host devices, one compilation cache, quick compilation, and
what torchvision needs to be imported."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

import pytest

# Before JAX starts: sharding needs several devices; the cache spares workers and later runs each other's compilations;
# and what tests compile runs once or twice.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"  # the other cores have tests of their own
if version("jaxlib").startswith("0.10."):  # later versions no longer have it: the quicker of two code generators
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("EQZOO_HOST", "off")  # scripts would import everything twice

try:
    import torch
except ModuleNotFoundError:  # the tests that compare with upstream can't run; the others can
    pass
else:
    torch.set_num_threads(1)  # workers share the cores
    # torchvision's compiled operators don't load beside torch's CPU build; building and running models needs only
    # that these two exist.
    OPERATORS = torch.library.Library("torchvision", "DEF")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    @pytest.fixture(autouse=True)
    def _torch_draws_the_same_numbers_every_time():
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compiled_programs_stay_few():
    """They take memory, and mappings of it: a process that has used up what Linux allows, 65,530, crashes in XLA."""
    import jax

    yield
    if (mappings := Path("/proc/self/maps")).exists() and mappings.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


def pytest_collection_finish():
    """Tracing makes many small objects, and torch's are no garbage: searching them took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="module")
def compile_as_users_do():
    """For what optimisation could change."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
