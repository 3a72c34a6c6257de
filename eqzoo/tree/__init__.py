"""Helpers for any pytree: a list of dicts, an `eqx.Module`, a model of the zoo."""

from eqzoo.tree.paths import leaves_with_paths as leaves_with_paths
from eqzoo.tree.paths import map_with_path as map_with_path
