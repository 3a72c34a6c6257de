"""create, apply, freeze, save and load serve every model, the zoo's and a user's own, and say clearly what is wrong."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqzoo
from eqzoo import CheckpointError, nn
from eqzoo.models.vision.resnet import ResNet, ResNetConfig

KEY = jax.random.key(0)
TINY = ResNetConfig(block="basic", depths=(1, 2), widths=(8, 16), num_classes=5)


class UserNet(eqx.Module):
    """A model of somebody who knows Equinox and nothing of `eqzoo.nn`."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width: int = 4, *, key):
        self.linear = eqx.nn.Linear(3, width, key=key)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return self.dropout(self.linear(x), key=key)


class UserBatchNormNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, *, key):
        self.conv = eqx.nn.Conv2d(3, 4, 3, key=key)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")

    def __call__(self, x, state, *, key=None):
        y, state = self.norm(self.conv(jnp.moveaxis(x, -1, 0)), state)
        return jnp.mean(y, (1, 2)), state


@pytest.fixture(scope="module")
def tiny():
    model, state = eqx.nn.make_with_state(ResNet)(TINY, key=KEY)
    images = jax.random.normal(KEY, (4, 16, 16, 3))
    _, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(images, state)
    return model, state, images


def user(name: str) -> str:
    return f"{__name__}:{name}"


def test_create_gives_a_pair_and_takes_config_fields():
    model, state = eqzoo.create("mlp", hidden=(7,), image_size=4, num_classes=3, key=KEY)
    assert model.layers[0].linear.weight.shape == (7, 16)
    assert model(jnp.zeros((4, 4, 1))).shape == (3,)
    assert jax.tree.leaves(state) == []


def test_create_takes_a_class_of_the_user():
    model, state = eqzoo.create(user("UserNet"), width=6, key=KEY)
    assert eqx.tree_equal(model, UserNet(6, key=KEY))
    assert jax.tree.leaves(state) == []
    model, state = eqzoo.create(user("UserBatchNormNet"), key=KEY)
    assert eqzoo.is_stateful(model)
    assert jax.tree.leaves(state)


@pytest.mark.parametrize(
    ("name", "options", "error", "sentence"),
    [
        ("resnet18", {"num_clases": 10}, TypeError, "resnet18 has no option 'num_clases'; did you mean 'num_classes'?"),
        ("resnet18", {"zzz": 10}, TypeError, "resnet18 has no option 'zzz'; it has block, depths"),
        ("UserNet", {"widht": 3}, TypeError, "has no option 'widht'; did you mean 'width'?"),
        ("Nothing", {}, ValueError, "has no 'Nothing'"),
        ("no_such_module:Net", {}, ValueError, "no module named 'no_such_module'; give it as package.module:Class"),
        ("mlp", {"hidden": ()}, ValueError, "pass at least one width"),
        ("resnet18", {"base_width": 4}, ValueError, "block='basic' has no groups, but cardinality=1 and base_width=4"),
        ("resnet18", {"depths": (1, 2)}, ValueError, "differ in length"),
    ],
)
def test_create_says_what_is_wrong(name, options, error, sentence):
    name = user(name) if name in ("UserNet", "Nothing") else name
    with pytest.raises(error) as caught:
        eqzoo.create(name, key=KEY, **options)
    assert sentence in str(caught.value)


def test_apply_serves_stateless_and_stateful_alike(tiny):
    model, state, images = tiny
    call = lambda x: eqzoo.apply(model, state, x)
    logits, new = jax.vmap(call, axis_name="batch", out_axes=(0, None))(images)
    assert logits.shape == (4, 5)
    assert not eqx.tree_equal(jax.tree.leaves(new), jax.tree.leaves(state))
    mlp, empty = eqzoo.create("mlp", key=KEY)
    y, same = eqzoo.apply(mlp, empty, jnp.ones((28, 28, 1)))
    assert same is empty
    assert y.shape == (10,)
    assert eqzoo.apply(*eqzoo.create(user("UserNet"), key=KEY), jnp.ones(3), key=KEY)[0].shape == (4,)


def test_freeze_gives_a_pure_function_with_the_models_other_methods(tiny):
    model, state, images = tiny
    frozen = eqzoo.freeze(model, state)
    inference = eqx.nn.inference_mode(model)
    expected, _ = inference(images[0], jax.tree.map(jnp.asarray, state))
    for _ in range(2):  # Equinox voids a state that was passed on; a frozen model must not use its own up
        np.testing.assert_array_equal(frozen(images[0]), expected)
    assert [a.shape for a in frozen.features(images[0])] == [(4, 4, 8), (2, 2, 16)]
    assert frozen.config == TINY
    with pytest.raises(AttributeError, match="no_such_thing"):
        frozen.no_such_thing  # noqa: B018
    assert eqzoo.freeze(frozen, state) is not None
    assert not eqzoo.is_stateful(frozen)


def test_a_frozen_models_methods_hold_its_weights_as_leaves(tiny):
    """So that `eqx.filter_jit` takes them as arguments; in a closure they would be constants of the program."""
    model, state, images = tiny
    frozen = eqzoo.freeze(model, state)
    assert eqx.tree_equal(jax.tree.leaves(frozen.features), jax.tree.leaves(frozen))
    traces = 0

    @eqx.filter_jit
    def last(features, x):
        nonlocal traces
        traces += 1
        return features(x)[-1]

    other = jax.tree.map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, frozen)
    assert not np.array_equal(last(frozen.features, images[0]), last(other.features, images[0]))
    assert traces == 1


def test_a_frozen_models_statistics_get_no_gradient(tiny):
    model, state, images = tiny
    frozen = eqzoo.freeze(model, state)
    grads = eqx.filter_grad(lambda frozen: jnp.sum(frozen(images[0])))(frozen)
    assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(grads.state))
    assert jnp.any(grads.model.head.weight != 0)


def test_freezing_a_stateless_model_sets_inference_mode():
    model, state = eqzoo.create(user("UserNet"), key=KEY)
    frozen = eqzoo.freeze(model, state)
    assert isinstance(frozen, UserNet)
    assert frozen(jnp.ones(3)).shape == (4,)


def test_save_and_load_bit_for_bit(tiny, tmp_path):
    model, state, _ = tiny
    path = tmp_path / "tiny.safetensors"
    eqzoo.save(path, model, state)
    loaded, loaded_state = eqzoo.load(path, trainable=True)
    assert eqx.tree_equal((loaded, loaded_state), (model, state))
    assert eqx.tree_equal(eqzoo.load(path), eqzoo.freeze(model, state))
    assert "stages.1.rest[0].convs.0.norm.running.var" in load_file(path)


def test_save_takes_a_frozen_model_and_keeps_half_precision(tiny, tmp_path):
    model, state, _ = tiny
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    eqzoo.save(tmp_path / "half.safetensors", eqzoo.freeze(half, state))
    loaded = eqzoo.load(tmp_path / "half.safetensors")
    assert eqx.tree_equal(loaded, eqzoo.freeze(half, state))
    assert loaded.model.head.weight.dtype == jnp.bfloat16


def test_a_users_model_is_saved_and_loaded(tmp_path):
    path = tmp_path / "user.safetensors"
    model = UserNet(6, key=KEY)
    eqzoo.save(path, model)
    loaded, _ = eqzoo.load(path, like=UserNet(6, key=jax.random.key(1)), trainable=True)
    assert eqx.tree_equal(loaded, model)
    with pytest.raises(CheckpointError, match=r"linear.weight: shape \(6, 3\) in the file, \(4, 3\) in the model"):
        eqzoo.load(path, name=user("UserNet"))
    with pytest.raises(CheckpointError, match="doesn't say which model it holds: pass `name=`"):
        eqzoo.load(path)
    stateful = eqzoo.create(user("UserBatchNormNet"), key=KEY)
    eqzoo.save(path, *stateful)
    assert eqx.tree_equal(eqzoo.load(path, name=user("UserBatchNormNet"), trainable=True), stateful)
    assert eqx.tree_equal(eqzoo.load(path, like=stateful, trainable=True), stateful)


def test_saving_without_the_state_or_a_changed_model_is_refused(tiny, tmp_path):
    model, state, _ = tiny
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"a ResNet has running statistics; pass its state too"):
        eqzoo.save(path, model)
    changed = eqx.tree_at(lambda m: m.head, model, nn.Linear(16, 7, key=KEY))
    with pytest.raises(
        CheckpointError, match=r"(?s)this ResNet does not fit its own config.*head.weight: shape \(7, 16\).*\(5, 16\)"
    ):
        eqzoo.save(path, changed, state)
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_only_name_models_of_the_zoo(tmp_path):
    path = tmp_path / "x.safetensors"
    for description in ('{"model": "os.system", "config": {}}', "{", '{"model": "MLP", "config": {"nope": 1}}', "[]"):
        save_file({"a": np.zeros(1, np.float32)}, path, {"eqzoo": description})
        with pytest.raises(CheckpointError, match="x.safetensors names no model that eqzoo can make"):
            eqzoo.load(path)


def test_missing_and_extra_tensors_are_reported_from_both_sides(tiny, tmp_path):
    model, state, _ = tiny
    path = tmp_path / "tiny.safetensors"
    eqzoo.save(path, model, state)
    tensors = load_file(path)
    tensors["extra"] = tensors.pop("head.bias")
    described = json.dumps({"model": "ResNet", "config": {**vars(TINY)}})
    save_file(tensors, path, {"eqzoo": described})
    with pytest.raises(CheckpointError) as caught:
        eqzoo.load(path)
    message = str(caught.value)
    assert "does not fit ResNet: 1 missing, 1 unexpected, 0 of a wrong shape or kind" in message
    assert "head.bias (5,)" in message
    assert "extra" in message


def test_a_truncated_file_and_a_missing_one(tiny, tmp_path):
    model, state, _ = tiny
    path = tmp_path / "tiny.safetensors"
    eqzoo.save(path, model, state)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="tiny.safetensors"):
        eqzoo.load(path)
    with pytest.raises(FileNotFoundError, match="tinny.safetensors"):
        eqzoo.load(tmp_path / "tinny.safetensors")
