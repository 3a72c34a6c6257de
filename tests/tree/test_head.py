"""A swapped head is as the model's own class draws it; the body is the same objects, and the state still fits."""

import dataclasses
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqzoo
from eqzoo import nn
from eqzoo.tree.head import swap_head
from eqzoo.tree.int8 import Int8, quantize, stored_as_int8
from eqzoo.tree.paths import leaves_with_paths
from tests.contract.table import BATCH, KINDS, assert_close, jitted_train_step, randomised

KEY = jax.random.key(3)
VISION = [row for row in KINDS if hasattr(row.config, "num_classes")]
VIT = next(row for row in KINDS if row.model is eqzoo.ViT)


@pytest.fixture(scope="module", params=VISION, ids=lambda row: row.model.__name__)
def subject(request):
    """A row, its model and state, and the model with a head for three classes."""
    model, state = randomised(request.param, seed=0)
    return request.param, model, state, swap_head(model, 3, key=KEY)


def test_only_the_head_is_new(subject):
    row, model, _, swapped = subject
    fresh, _ = row.make(KEY, replace(row.config, num_classes=3))
    assert eqx.tree_equal(swapped.head, fresh.head)
    assert jax.tree.structure(swapped) == jax.tree.structure(fresh)
    assert swapped.config == replace(row.config, num_classes=3)
    assert model.config == row.config
    for field in dataclasses.fields(model):
        if field.name not in ("head", "config"):
            assert getattr(swapped, field.name) is getattr(model, field.name), field.name


def test_features_are_as_before_and_the_state_fits(subject):
    row, model, state, swapped = subject
    xs = row.batch(1)

    @eqx.filter_jit
    def run(model, xs):
        frozen = eqzoo.freeze(model, state)
        return jax.vmap(frozen.features)(xs), jax.vmap(frozen)(xs)

    features, outputs = run(swapped, xs)
    expected, _ = run(model, xs)
    assert eqx.tree_equal(features, expected)
    assert outputs.shape == (BATCH, 3)
    assert np.any(outputs != 0)


def test_it_trains(subject):
    row, _, state, swapped = subject
    outputs, _, gradients = jitted_train_step(swapped, state, row.batch(1), jax.random.split(KEY, BATCH))
    assert outputs.shape == (BATCH, 3)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    assert np.any(gradients.head.weight != 0)


def test_save_is_load(subject, tmp_path):
    _, _, state, swapped = subject
    eqzoo.save(tmp_path / "m.safetensors", swapped, state)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "m.safetensors", trainable=True), (swapped, state))


def test_a_head_is_removed_and_put_back(subject):
    row, model, _, swapped = subject
    headless = swap_head(model, 0, key=KEY)
    assert headless.head is None
    assert jax.tree.structure(headless) == jax.tree.structure(row.skeleton(headless.config)[0])
    assert eqx.tree_equal(swap_head(headless, 3, key=KEY), swapped)


def test_as_many_classes_as_before_still_means_a_new_head(subject):
    row, model, *_ = subject
    again = swap_head(model, row.config.num_classes, key=KEY)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert not np.any(again.head.weight == model.head.weight)


def test_both_heads_of_a_distilled_model():
    config = replace(VIT.config, registers=0, distilled=True)
    model, _ = VIT.make(KEY, config)
    swapped = swap_head(model, 3, key=KEY)
    fresh, _ = VIT.make(KEY, replace(config, num_classes=3))
    assert eqx.tree_equal((swapped.head, swapped.distillation_head), (fresh.head, fresh.distillation_head))
    assert swapped.distillation_token is model.distillation_token


def test_wrapped_layers_of_the_body_stay_wrapped():
    model, _ = randomised(VIT, seed=0)
    swapped = swap_head(quantize(model, ("*.attention", "head")), 3, key=KEY)
    assert stored_as_int8(swapped) == [f"blocks[*].attention.{name}" for name in ("query", "key", "value", "out")]
    assert isinstance(swapped.blocks.block.attention.out, Int8)
    assert isinstance(swapped.head, nn.Linear)


def test_under_jit():
    model, _ = randomised(VIT, seed=0)
    compiled = eqx.filter_jit(lambda model, key: swap_head(model, 3, key=key))(model, KEY)
    assert eqx.tree_equal(compiled, swap_head(model, 3, key=KEY))


# Models of one's own


@dataclass(frozen=True)
class Config:
    width: int = 4
    num_classes: int = 5


class Own(eqx.Module):
    """With the head deep inside a tuple, a function among its leaves, and a static field that counts the classes."""

    body: eqx.nn.Linear
    activation: object
    last: tuple[eqx.nn.Linear, Array]
    classes: int = eqx.field(static=True)
    config: Config

    def __init__(self, config: Config, *, key):
        keys = jax.random.split(key)
        self.body = eqx.nn.Linear(3, config.width, key=keys[0])
        self.activation = lambda x: jnp.maximum(x, 0)
        self.last = (eqx.nn.Linear(config.width, config.num_classes, key=keys[1]), jnp.ones(config.num_classes))
        self.classes = config.num_classes
        self.config = config

    def __call__(self, x):
        linear, scale = self.last
        return linear(self.activation(self.body(x))) * scale


def test_a_model_of_ones_own():
    model = Own(Config(), key=jax.random.key(0))
    swapped = swap_head(model, 2, key=KEY)
    assert swapped(jnp.ones(3)).shape == (2,)
    assert (swapped.classes, swapped.config) == (2, Config(num_classes=2))
    assert swapped.body is model.body
    assert swapped.activation is model.activation
    assert_close(swapped.last, Own(Config(num_classes=2), key=KEY).last, 1e-6)


class NoConfig(eqx.Module):
    head: nn.Linear


class OtherSignature(eqx.Module):
    head: nn.Linear
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, width: int, *, key):
        self.head = nn.Linear(width, config.num_classes, key=key)
        self.config = config


HEAD = nn.Linear(2, 2, key=KEY)
REMEDY = r"put a head of your own in its place: `eqzoo.tree.replace\(model, {'head': head}\)`$"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: next(row for row in KINDS if row.model is eqzoo.GPT2).skeleton()[0], f"a GPT2 has no .*{REMEDY}"),
        (lambda: NoConfig(HEAD), f"a NoConfig has no `config` with a field num_classes; {REMEDY}"),
        (lambda: {"head": HEAD}, f"a dict has no `config` .*{REMEDY}"),
        (
            lambda: OtherSignature(Config(), 2, key=KEY),
            rf"isn't made by OtherSignature\(config, key=key\) \(missing a required .* 'width'\); {REMEDY}",
        ),
        (
            lambda: eqzoo.freeze(*next(r for r in KINDS if r.model is eqzoo.ResNet).make(KEY)),
            "a frozen model has its state",
        ),
    ],
    ids=["GPT2", "no config", "no module", "another signature", "frozen"],
)
def test_models_without_such_a_head(make, message):
    with pytest.raises(ValueError, match=message):
        swap_head(make(), 3, key=KEY)


def test_a_negative_number_of_classes():
    model, _ = VIT.skeleton()
    with pytest.raises(ValueError, match="num_classes=-1 is negative; pass 0 to remove the head"):
        swap_head(model, -1, key=KEY)


def test_paths_outside_of_the_head_stay():
    """So a checkpoint, a mask or an optimiser's state of the body still speaks of the same leaves."""
    model, _ = VIT.skeleton()
    names = lambda model: [path for path, _ in leaves_with_paths(model) if not path.startswith("head")]
    assert names(swap_head(model, 3, key=KEY)) == names(model)
