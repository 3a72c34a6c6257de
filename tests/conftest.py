"""One compilation cache for the whole run, 8 host devices, jaxtyping on every function of the package, torchvision's operators."""

import os

# Before JAX starts: the sharding tests need several devices, and the cache spares the workers each other's compilations.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
