"""Policy: the model computes in half precision, what is trained and remembered stays in float32."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import eqzoo
from eqzoo.train.losses import cross_entropy
from eqzoo.train.precision import Policy

RESNET = {"depths": (1, 1), "widths": (4, 8), "num_classes": 4}
VIT = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 4, "image_size": 16, "num_classes": 4}
MODELS = pytest.mark.parametrize(("name", "options"), [("resnet18", RESNET), ("vit_b_16", VIT)], ids=["resnet", "vit"])
IMAGES = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))


def test_casts_float_arrays_and_nothing_else():
    tree = {
        "W": jnp.ones(2),
        "host": np.ones(2, np.float32),
        "double": np.ones(2),
        "rate": 0.1,
        "count": jnp.ones(2, int),
        "key": jax.random.key(0),
        "act": jax.nn.relu,
        "none": None,
    }
    cast = Policy("bfloat16").to_compute(tree)
    assert all(cast[name].dtype == jnp.bfloat16 for name in ("W", "host", "double"))
    assert all(cast[name] is tree[name] for name in ("rate", "count", "key", "act", "none"))
    assert tree["W"].dtype == jnp.float32


def test_float32_changes_nothing():
    model, _ = eqzoo.create("resnet18", key=jax.random.key(0), **RESNET)
    assert eqx.tree_equal(Policy().to_compute(model), model)
    assert Policy() == Policy("float32")


@MODELS
def test_the_model_computes_in_bfloat16_and_gradients_and_statistics_are_float32(name, options):
    model, state = eqzoo.create(name, key=jax.random.key(0), **options)

    def gradient(policy):
        def loss_fn(model):
            forward = lambda image: eqzoo.apply(policy.to_compute(model), state, policy.to_compute(image))
            logits, after = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(IMAGES)
            return jnp.mean(cross_entropy(logits, jnp.arange(4))), (after, logits)

        return eqx.filter_jit(eqx.filter_value_and_grad(loss_fn, has_aux=True))(model)

    (loss, (after, logits)), grads = gradient(Policy("bfloat16"))
    (exact_loss, (_, exact_logits)), exact_grads = gradient(Policy("float32"))
    assert (logits.dtype, loss.dtype, exact_logits.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    dtypes = lambda tree: [leaf.dtype for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
    assert dtypes(grads) == dtypes(eqx.filter(model, eqx.is_inexact_array)) == [jnp.float32] * len(dtypes(grads))
    assert dtypes(after) == dtypes(state)
    assert abs(loss - exact_loss) < 0.02
    flat, exact = (jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (grads, exact_grads))
    error = float(jnp.linalg.norm(flat - exact) / jnp.linalg.norm(exact))
    assert 1e-4 < error < 0.1, error  # rounded, and not by much


@MODELS
def test_every_product_is_one_of_bfloat16(name, options):
    policy = Policy("bfloat16")
    model, state = eqzoo.create(name, key=jax.random.key(0), **options)
    arrays, static = eqx.partition(model, eqx.is_array)

    def run(arrays, images):
        model = policy.to_compute(eqx.combine(arrays, static))
        forward = lambda image: eqzoo.apply(model, state, image)
        return jax.vmap(forward, axis_name="batch", out_axes=(0, None))(policy.to_compute(images))[0]

    products = list(operands(jax.make_jaxpr(run)(arrays, IMAGES).jaxpr))
    sums_of_norms = [pair for pair in products if pair[1].shape[1:] == (1,)]  # over rows, as products with ones
    others = [pair for pair in products if pair not in sums_of_norms]
    assert len(others) >= 7
    assert all(operand.dtype == jnp.bfloat16 for pair in others for operand in pair)
    assert all(operand.dtype == jnp.float32 for pair in sums_of_norms for operand in pair)


def operands(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "eqzoo_conv"):
            yield [operand.aval for operand in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            yield from operands(inner)


def test_is_frozen_and_knows_its_choices():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().compute = "bfloat16"
    policy = Policy()
    object.__setattr__(policy, "compute", "fp16")  # the tests' own type checks would refuse it before
    with pytest.raises(ValueError, match=r"Policy: compute='fp16' is unknown; choose 'float32', 'bfloat16'"):
        policy.__post_init__()
