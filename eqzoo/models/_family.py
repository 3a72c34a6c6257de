"""What a family file tells the rest of eqzoo about itself."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from eqzoo.checkpoint.rules import Alias, Drop, Rule


class Family(NamedTuple):
    """One architecture: its class, its named configs, and its rules.

    `rules` has one tuple per upstream naming ("torchvision", "timm", "transformers"); the names of a checkpoint decide
    which applies. `sharding` pairs a regex on leaf paths with a partition; the first that matches counts.
    """

    model: type[Any]
    config: type[Any]
    variants: Mapping[str, Any]
    rules: Mapping[str, tuple[Rule | Drop | Alias, ...]]
    sharding: tuple[tuple[str, PartitionSpec], ...]
