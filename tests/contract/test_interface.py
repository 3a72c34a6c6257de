"""What every family offers in the same way: its leaves, parts, file and program, and what it says to mistakes."""

import dataclasses
import inspect
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import AbstractArray

import eqzoo
from eqzoo._registry import families
from eqzoo.tree import leaves_with_paths
from tests.contract.table import ROWS, assert_close, cast, jitted_train, train


@pytest.mark.parametrize("family", families(), ids=lambda family: family.model.__name__)
def test_every_family_has_a_row(family):
    names = [row.model.__name__ for row in ROWS]
    assert names.count(family.model.__name__) == 1, f"tests/contract/table.py needs one row for {family.model.__name__}"


def test_row_is_complete(row):
    """Every rate is on, and every stack has two layers or more, but in a backbone, whose family has its own row."""
    assert all(getattr(row.config, rate) > 0 for rate in row.rates)
    model, _ = row.skeleton()
    own = [getattr(model, field.name) for field in dataclasses.fields(model) if field.name != "backbone"]
    is_stack = lambda node: isinstance(node, eqzoo.nn.Stack)
    assert all(node.depth >= 2 for node in jax.tree.leaves(own, is_leaf=is_stack) if is_stack(node))


def test_leaves(subject):
    """A model is floating-point JAX arrays, annotated as such, and `inference` flags; nothing else."""
    for path, leaf in leaves_with_paths(subject.model):
        if path.endswith("inference"):
            assert leaf is False
        else:
            assert isinstance(leaf, jax.Array), path
            assert leaf.dtype == jnp.float32, path
    for module in _modules(subject.model):
        for field in dataclasses.fields(module):
            if isinstance(getattr(module, field.name), jax.Array):
                kinds = (field.type, *typing.get_args(field.type))
                assert any(inspect.isclass(kind) and issubclass(kind, AbstractArray) for kind in kinds), field
    leaves, treedef = jax.tree.flatten(subject.model)
    assert eqx.tree_equal(jax.tree.unflatten(treedef, leaves), subject.model)


def _modules(tree):
    """Every module in a tree, the outermost first."""
    is_inner = lambda node: isinstance(node, eqx.Module) and node is not tree
    if isinstance(tree, eqx.Module):
        yield tree
    for node in jax.tree.leaves(tree, is_leaf=is_inner):
        if is_inner(node):
            yield from _modules(node)


def test_features_lead_to_the_output(subject, predictions):
    def read_out(frozen, x):
        inner = frozen.features(x) if hasattr(frozen, "features") else frozen.hidden(x)
        return subject.row.read_out(frozen, inner)

    outputs = eqx.filter_jit(eqx.filter_vmap(read_out, in_axes=(None, 0)))(subject.frozen, subject.xs)
    assert_close(outputs, predictions, 1e-5)


CLASSIFIERS = [row for row in ROWS if hasattr(row.config, "num_classes")]


@pytest.mark.parametrize("row", CLASSIFIERS, indirect=True, ids=lambda row: row.model.__name__)
def test_no_classes_gives_the_embedding(subject, predictions):
    """With `num_classes=0` there is no head, and the old head maps the embedding to the old output."""
    skeleton, _ = subject.row.skeleton(dataclasses.replace(subject.row.config, num_classes=0))
    assert skeleton.head is None
    head = subject.model.head
    kept = {path for path, _ in leaves_with_paths(skeleton)}
    body = [leaf for path, leaf in leaves_with_paths(subject.model) if path in kept]
    headless = jax.tree.unflatten(jax.tree.structure(skeleton), body)
    embeddings = eqx.filter_jit(eqx.filter_vmap(eqzoo.freeze(headless, subject.state)))(subject.xs)
    assert embeddings.shape == (*predictions.shape[:-1], head.weight.shape[1])
    assert_close(subject.row.after_head(jax.vmap(head)(embeddings)), predictions, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_is_load(subject, dtype, tmp_path):
    """Bit for bit, from nothing but the file."""
    model = cast(subject.model, dtype)
    eqzoo.save(tmp_path / "model.safetensors", model, subject.state)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "model.safetensors", trainable=True), (model, subject.state))
    frozen = eqzoo.freeze(model, subject.state)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "model.safetensors"), frozen)


def test_export(subject, predictions):
    """A compiled program for other processes and languages computes the same."""
    exported = jax.export.export(jax.jit(jax.vmap(subject.frozen)))(subject.xs)
    outputs = jax.export.deserialize(exported.serialize()).call(subject.xs)
    assert_close(outputs, predictions, 1e-5)


def test_training_is_random_where_a_rate_says_so(subject, step):
    """The same keys drop the same, others other things."""
    row, model, state, xs, keys = subject
    again = jitted_train(model, state, xs, keys)[0]
    others = jitted_train(model, state, xs, jax.random.split(jax.random.key(7), len(xs)))[0]
    assert_close(again, step.outputs, 1e-5)
    assert np.array_equal(again, others) != bool(row.rates)


def test_missing_key(subject):
    """A rate above zero needs a key, and says so; a model without needs none."""
    row, model, state, xs, _ = subject
    if row.rates:
        with pytest.raises(
            ValueError, match=r"Drop\w+\(rate=0\.1\) got no key .*: pass `key=` .* `eqx.nn.inference_mode"
        ):
            eqx.filter_eval_shape(train, model, state, xs, None)
    without = lambda xs: train(*row.make(jax.random.key(0), row.quiet()), xs, None)
    outputs, _ = eqx.filter_eval_shape(without, xs)
    assert outputs.shape[0] == len(xs)


def test_inference_ignores_the_key(subject, predictions):
    outputs = eqx.filter_jit(jax.vmap(lambda x, key: subject.frozen(x, key=key)))(subject.xs, subject.keys)
    assert_close(outputs, predictions, 1e-6)


def _mistakes(x):
    """What a user might pass for one example `x`, and what helps."""
    yield x[None], "`jax.vmap(model)`"
    yield x[0], f"pass an array with {x.ndim} axes"
    yield np.asarray(x), "`jnp.asarray("
    if x.ndim == 3:
        yield jnp.moveaxis(x, -1, 0), "`jnp.moveaxis("
        yield jnp.concatenate([x, x], axis=-1), f"`in_channels={2 * x.shape[-1]}`"
        yield x.astype(jnp.uint8), ".astype(jnp.float32)"
    else:
        yield x.astype(jnp.float32), ".astype(jnp.int32)"


def test_mistakes(subject):
    """One sentence: the class, the argument, what was given, what was expected, what to do; from every method."""
    model = eqx.nn.inference_mode(subject.model)
    inner = model.features if hasattr(model, "features") else model.hidden
    state = (subject.state,) if eqzoo.is_stateful(model) else ()
    argument = next(name for name in inspect.signature(subject.row.model.__call__).parameters if name != "self")
    for mistake, remedy in _mistakes(subject.xs[0]):
        for method in (model, inner):
            with pytest.raises(TypeError) as raised:
                method(mistake, *state)
            sentence = str(raised.value)
            given, _, rest = sentence.partition(", expected ")
            expected, _, advice = rest.partition("; ")
            assert given.startswith(f"{subject.row.model.__name__}: {argument} is ")
            assert f"shape {mistake.shape} and dtype {mistake.dtype}" in given
            assert expected.startswith(
                ("a float array of shape (", "a int array of shape (", "an int array of shape (")
            )
            assert remedy in advice
            assert "\n" not in sentence
