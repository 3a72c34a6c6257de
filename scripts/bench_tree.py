"""How long functions of `eqzoo.tree` take at first (to compile) and then to run for a tree of 10,000 small leaves.

    python scripts/bench_tree.py
    python scripts/bench_tree.py --dicts 250

The tree is a list of 2,500 dicts of 4 leaves: once of the same shapes in each dict, once of shapes that all differ.
The first row, which doubles each leaf, is what XLA takes for any function that makes so many arrays. `stats` makes six
arrays a leaf, which is more than XLA compiles into one program in 24 GB: it is called outside of `jit`, and its first
call compiles a small program for each shape.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from eqzoo.tree import add_noise, clip_by_global_norm, norm, stats, summary

FUNCTIONS: dict[str, Callable[[PyTree], PyTree]] = {
    "doubled": lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree),
    "add_noise": lambda tree: add_noise(tree, jax.random.key(0), 0.1),
    "norm": norm,
    "clip_by_global_norm": lambda tree: clip_by_global_norm(tree, 1.0),
}
OUTSIDE_JIT: dict[str, Callable[[PyTree], object]] = {"stats": stats, "summary": lambda tree: str(summary(tree))}
TREES = ("same shapes", "different shapes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dicts", type=int, default=2500)
    names = [*FUNCTIONS, *OUTSIDE_JIT]
    parser.add_argument("--functions", nargs="+", choices=names, default=names)
    parser.add_argument("--trees", nargs="+", choices=TREES, default=TREES)
    arguments = parser.parse_args()
    print(f"{'seconds':42}{'first':>10}{'then':>10}")
    for kind in arguments.trees:
        tree = make_tree(arguments.dicts, same=kind == "same shapes")
        for name in arguments.functions:
            start = time.perf_counter()
            if name in FUNCTIONS:
                call = jax.jit(FUNCTIONS[name]).lower(tree).compile()
            else:
                call = OUTSIDE_JIT[name]
                jax.block_until_ready(call(tree))
            first = time.perf_counter() - start
            print(f"{f'{name}, {kind}':42}{first:10.1f}{seconds(lambda: call(tree)):10.3f}", flush=True)


def make_tree(dicts: int, *, same: bool) -> list[dict[str, jax.Array]]:
    def shapes(i):
        if same:
            return {"W": (8, 8), "b": (8,), "V": (8, 4), "c": (4,)}
        return {"W": (i % 50 + 1, i // 50 + 1), "b": (i + 1,), "V": (i + 1, 2), "c": (i % 25 + 1, i // 25 + 1, 3)}

    generator = np.random.default_rng(0)  # drawing with JAX would compile a program for each shape
    draw = lambda shape: jax.device_put(generator.standard_normal(shape, np.float32))
    return [{name: draw(shape) for name, shape in shapes(i).items()} for i in range(dicts)]


def seconds(call: Callable[[], object]) -> float:
    """The best of three turns, after one to warm up."""
    turns = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(call())
        turns.append(time.perf_counter() - start)
    return min(turns[1:])


if __name__ == "__main__":
    main()
