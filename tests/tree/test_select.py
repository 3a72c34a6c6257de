"""`select` marks the numbers that a glob, a regex, a type, a predicate or several of these mean, in any tree."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn
from eqzoo.tree.paths import leaves_with_paths, paths
from eqzoo.tree.select import is_float, is_number, select
from tests.contract.table import ROWS

VIT, _ = next(row for row in ROWS if row.model.__name__ == "ViT").skeleton()


def selected(tree: Any, where: Any) -> list[str]:
    return [path for path, chosen in leaves_with_paths(select(tree, where)) if chosen]


def named(pattern: str) -> list[str]:
    """The paths in the ViT that hold numbers and match a regex."""
    return [path for path, leaf in leaves_with_paths(VIT) if is_number(leaf) and re.fullmatch(pattern, path)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("head", r"head\..*"),
        ("head.bias", r"head\.bias"),
        ("*.bias", r".*\.bias"),
        ("*norm", r"(.*\.)?\w*norm\..*"),
        ("*.attention.*", r"blocks.*\.attention\..*"),
        ("blocks", r"blocks.*"),
        ("blocks[*]", r"blocks.*"),
        ("blocks[*].norm?", r"blocks.*\.norm\d\..*"),
        ("blocks[*].mlp.fc1.weight", r"blocks\[\*\]\.mlp\.fc1\.weight"),
        ("p*", r"(positions|patch_embed.*|pre_norm.*)"),
        ("*", r".*"),
        (re.compile(r"head\.\w+"), r"head\..*"),
        (re.compile(r".*norm\d\.weight"), r"blocks.*\.norm\d\.weight"),
        (re.compile(r"(?i)HEAD.BIAS"), r"head\.bias"),
        (nn.LayerNorm, r".*norm\d?\..*"),
        (nn.PatchEmbed, r"patch_embed.*"),
        (nn.Stack, r"blocks.*"),
        (nn.Attention, r".*\.attention\..*"),
        (type(VIT), r".*"),
        (lambda path, leaf: leaf.ndim == 3 and "fc" in path, r"blocks.*fc\d\.weight"),
        (lambda path, leaf: False, r"nothing"),
        (("head", nn.LayerNorm), r"head.*|.*norm\d?\..*"),
        (("head", ("positions", lambda path, leaf: path == "registers")), r"head.*|positions|registers"),
        (("head", "head"), r"head.*"),
    ],
)
def test_each_form_of_where_selects_what_it_means(where, expected):
    assert selected(VIT, where) == named(expected)
    assert jax.tree.structure(select(VIT, where)) == jax.tree.structure(VIT)


def test_a_mask_is_of_booleans():
    for where in ("head", nn.LayerNorm, re.compile("positions"), lambda path, leaf: np.bool_(True), ("head", "*")):
        assert {type(leaf) for leaf in jax.tree.leaves(select(VIT, where))} == {bool}


def test_a_glob_names_whole_parts_and_no_beginnings_of_names():
    tree = {"head": [1.0, {"W": 2.0}], "heads": 3.0, "head2": 4.0, "ahead": 5.0, "in": {"head": 6.0}}
    assert selected(tree, "head") == ["head.0", "head.1.W"]
    assert selected(tree, "head.1") == ["head.1.W"]
    assert selected(tree, "head?") == ["head2", "heads"]
    assert selected(tree, "*head") == ["ahead", "head.0", "head.1.W", "in.head"]
    assert selected(tree, "*.head") == ["in.head"]


def test_what_a_pattern_means_by_itself_means_nothing_else():
    tree = {"a.b": 1.0, "axb": 2.0, "a+b": 3.0, "[0]": 4.0, "0": 5.0}
    assert selected(tree, "a.b") == ["a.b"]
    assert selected(tree, "a+b") == ["a+b"]
    assert selected(tree, "[0]") == ["[0]"]
    assert selected(tree, re.compile("a.b")) == ["a+b", "a.b", "axb"]


def test_a_regex_matches_whole_paths():
    tree = {"head": 1.0, "heads": 2.0, "in": {"head": 3.0}}
    assert selected(tree, re.compile("head")) == ["head"]


def test_a_type_within_itself_and_subclasses():
    class Pair(eqx.Module):
        a: Any
        b: Any

    class Special(Pair):
        pass

    tree = [Pair(Pair(1.0, True), 2.0), Special(3.0, None), 4.0, (5.0,), jnp.ones(1)]
    assert selected(tree, Pair) == ["0.a.a", "0.b", "1.a"]
    assert selected(tree, Special) == ["1.a"]
    assert selected(tree, tuple) == ["3.0"]
    assert selected(tree, list) == ["0.a.a", "0.b", "1.a", "2", "3.0", "4"]


def test_trees_that_are_a_leaf_or_a_stack():
    assert select(1.0, lambda path, leaf: path == "") is True
    assert select(1.0, "*") is True
    stack = nn.Stack(lambda key: nn.RMSNorm(2), 3, key=jax.random.key(0))
    assert selected(stack, "[*].weight") == ["[*].weight"]
    assert selected(stack, nn.RMSNorm) == ["[*].weight"]
    nested = nn.Stack(lambda key: stack, 2, key=jax.random.key(0))
    assert selected([nested], "0[*][*]") == ["0[*][*].weight"]
    assert selected([nested], lambda path, leaf: path.count("[*]") == 2 and leaf.shape == (2, 3, 2)) == [
        "0[*][*].weight"
    ]


NO_NUMBERS = {
    "flag": True,
    "function": jax.nn.relu,
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0), 3),
    "shape of a key": jax.eval_shape(lambda: jax.random.key(0)),
    "string": "head",
    "object": object(),
    "type": float,
}
NUMBERS = {
    "array": jnp.ones(2),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "complex": 1j,
    "float": 1.0,
    "int": 3,
    "integers": jnp.ones(2, int),
    "numpy": np.ones(2),
    "scalar": np.float32(1),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    "unsigned": np.ones(2, np.uint8),
}


def test_what_is_no_number_is_never_selected():
    tree = {**NO_NUMBERS, **NUMBERS, "none": None}
    for where in ("*", re.compile(".*"), dict, lambda path, leaf: True, ("int", "*")):
        assert selected(tree, where) == sorted(NUMBERS)
    assert [name for name in NO_NUMBERS if is_number(NO_NUMBERS[name]) or is_float(NO_NUMBERS[name])] == []
    floats = {name for name in NUMBERS if is_float(NUMBERS[name])}
    assert floats == set(NUMBERS) - {"int", "integers", "unsigned"}


def test_a_predicate_sees_numbers_alone():
    seen = []
    select({**NO_NUMBERS, **NUMBERS}, lambda path, leaf: seen.append(path) or True)
    assert seen == sorted(NUMBERS)


def test_none_is_no_leaf():
    assert select({"a": None, "b": 1.0}, "*") == {"a": None, "b": True}
    assert select(eqx.filter({"a": 1, "b": jnp.ones(1)}, eqx.is_inexact_array), dict) == {"a": None, "b": True}


def test_skeletons_and_traced_arrays_are_selected_like_arrays():
    tree = {"a": [jnp.ones((2, 3)), jnp.ones(2, int)], "key": jax.random.key(0)}
    is_matrix = lambda path, leaf: leaf.ndim == 2
    traced = []
    jax.jit(lambda tree: traced.append((select(tree, "a"), select(tree, is_matrix))))(tree)
    expected = ({"a": [True, True], "key": False}, {"a": [True, False], "key": False})
    skeleton = jax.eval_shape(lambda: tree)
    assert traced == [expected]
    assert (select(skeleton, "a"), select(skeleton, is_matrix)) == expected
    assert (select(tree, "a"), select(tree, is_matrix)) == expected


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("haed", r"^select: no number's path matches 'haed'; the nearest are head.*$"),
        (("head", "haed"), r"^select: no number's path matches 'haed'; the nearest are head"),
        ("blocks.norm1", r"matches 'blocks.norm1'; the nearest are blocks\[\*\]\.norm1"),
        ("blocks[0].norm1", r"matches 'blocks\[0\]\.norm1'; the nearest are blocks\[\*\]\.norm1"),
        (re.compile("hea"), r"^select: no number's path matches 'hea'; the nearest are head"),
        ("dropout", r"^select: no number's path matches 'dropout'"),  # it holds a flag
        ("", r"^select: no number's path matches ''; the nearest are patch_embed"),
        (nn.BatchNorm, r"^select: the tree holds no eqzoo\.nn\.norm\.BatchNorm with numbers in it$"),
        (nn.Dropout, r"^select: the tree holds no eqzoo\.nn\.dropout\.Dropout with numbers in it$"),
    ],
)
def test_what_finds_nothing_is_an_error_that_names_the_nearest(where, sentence):
    with pytest.raises(ValueError, match=sentence):
        select(VIT, where)


def test_one_of_several_types_may_be_absent():
    """So that one `where` serves many models; a glob has to find something all the same."""
    assert selected(VIT, (nn.LayerNorm, nn.BatchNorm)) == selected(VIT, nn.LayerNorm)
    with pytest.raises(ValueError, match="holds no eqzoo.nn.norm.BatchNorm"):
        select(VIT, (nn.BatchNorm, nn.GroupNorm))
    with pytest.raises(ValueError, match="no number's path matches 'haed'"):
        select(VIT, (nn.LayerNorm, "haed"))


def test_nothing_means_nothing():
    with pytest.raises(ValueError, match=r"^select: where=\(\) means nothing; pass a glob, a regex, a type or a pred"):
        select(VIT, ())


def test_masks_and_texts_are_no_numbers():
    tree = {"mask": jnp.ones(2, bool), "text": np.array(["a"]), "flag": np.bool_(True), "x": np.ones(2)}
    assert selected(tree, lambda path, leaf: True) == ["x"]


def test_an_error_for_an_empty_tree():
    with pytest.raises(ValueError, match=r"the nearest are none: the tree is empty$"):
        select({"a": None}, "a")


def test_no_more_than_three_paths_are_suggested():
    with pytest.raises(ValueError, match="the nearest are ") as error:
        select({f"layer{index}": 1.0 for index in range(9)}, "layer")
    assert len(re.findall(r"layer\d", str(error.value))) == 3


def test_paths_are_those_of_all_leaves():
    assert paths({"a": [1.0, True], "b": None}) == ["a.0", "a.1"]
    assert paths(VIT) == [path for path, _ in leaves_with_paths(VIT)]
