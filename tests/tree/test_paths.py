"""Paths name leaves, in the order of `jax.tree.leaves`, and mark the layer axes of stacks."""

import equinox as eqx
import jax
import jax.numpy as jnp

from eqzoo import nn
from eqzoo.tree import leaves_with_paths, map_with_path


class Inner(eqx.Module):
    stack: nn.Stack[nn.Linear]

    def __init__(self, *, key):
        self.stack = nn.Stack(lambda key: nn.Linear(2, 2, use_bias=False, key=key), 3, key=key)


class Outer(eqx.Module):
    inner: nn.Stack[Inner]
    norms: list[nn.LayerNorm]

    def __init__(self, *, key):
        self.inner = nn.Stack(lambda key: Inner(key=key), 4, key=key)
        self.norms = [nn.LayerNorm(2), nn.LayerNorm(2, use_bias=False)]


MODEL = Outer(key=jax.random.key(0))


def test_modules_stacks_and_sequences():
    named = leaves_with_paths(MODEL)
    assert [path for path, _ in named] == [
        "inner[*].stack[*].weight",
        "norms.0.weight",
        "norms.0.bias",
        "norms.1.weight",
    ]
    assert all(a is b for (_, a), b in zip(named, jax.tree.leaves(MODEL), strict=True))
    assert named[0][1].shape == (4, 3, 2, 2)


def test_any_pytree():
    tree = {"layers": [{"W": 1.0, "b": 2.0}, {"W": 3.0}], "x": (4.0,)}
    assert dict(leaves_with_paths(tree)) == {"layers.0.W": 1.0, "layers.0.b": 2.0, "layers.1.W": 3.0, "x.0": 4.0}
    assert leaves_with_paths(5.0) == [("", 5.0)]


def test_a_stack_by_itself():
    assert [path for path, _ in leaves_with_paths(MODEL.inner)] == ["[*].stack[*].weight"]


def test_is_leaf_stops_the_walk():
    named = leaves_with_paths(MODEL, is_leaf=lambda node: isinstance(node, nn.LayerNorm | nn.Linear))
    assert [path for path, _ in named] == ["inner[*].stack[*]", "norms.0", "norms.1"]


def test_map_with_path_keeps_the_structure():
    doubled = map_with_path(lambda path, leaf: leaf * (2 if path.startswith("norms") else 1), MODEL)
    assert jax.tree.structure(doubled) == jax.tree.structure(MODEL)
    assert jnp.all(doubled.norms[0].weight == 2)
    assert eqx.tree_equal(doubled.inner, MODEL.inner)
