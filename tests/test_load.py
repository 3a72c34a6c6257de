"""`load` reads what torch wrote, in a process without torch; outputs and gradients are upstream's at full size."""

import copy
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.torch
import timm
import torch
import torchvision

import eqzoo
from eqzoo import CheckpointError
from eqzoo.checkpoint import unfill
from eqzoo.models.vision import _resnet_upstream as resnet
from eqzoo.models.vision import _vit_upstream as vit
from tests.parity import assert_close, assert_same_gradients, randomise

# Whoever imports torch in this process gets an error.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import jax, jax.numpy as jnp, numpy as np, eqzoo
path, name, images, out = sys.argv[1:]
logits = jax.vmap(eqzoo.load(path, name=name))(jnp.asarray(np.load(images)))
np.save(out, logits)
"""

UPSTREAM = {
    "resnet50": (lambda: torchvision.models.resnet50(), torch.save, "resnet50.pth", resnet.TIMM),
    "vit_small_patch16_224": (
        lambda: timm.create_model("vit_small_patch16_224"),
        safetensors.torch.save_file,
        "model.safetensors",
        vit.TIMM,
    ),
}


@pytest.fixture(params=UPSTREAM, scope="module")
def case(request, tmp_path_factory):
    make, save, filename, rules = UPSTREAM[request.param]
    model = randomise(make(), 0).eval()
    folder = tmp_path_factory.mktemp(request.param)
    save(model.state_dict(), folder / filename)
    images = np.random.default_rng(0).normal(size=(2, 224, 224, 3)).astype(np.float32)
    return request.param, model, folder, folder / filename, images, rules


def test_outputs_at_224_without_torch(case):
    name, model, folder, path, images, _ = case
    np.save(folder / "images.npy", images)
    command = [sys.executable, "-c", WITHOUT_TORCH, path, name, folder / "images.npy", folder / "logits.npy"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(torch.tensor(images).permute(0, 3, 1, 2))
    assert_close(np.load(folder / "logits.npy"), expected, 1e-4)


@eqx.filter_jit
@eqx.filter_grad
def gradients(frozen, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(frozen)(images), labels).mean()


def torch_gradients(model, images, labels):
    model.zero_grad()
    logits = model(torch.tensor(images).permute(0, 3, 1, 2))
    torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).backward()
    return model


def test_gradients_of_a_cross_entropy_at_224_in_double_precision(case):
    """Of each tensor. In single precision a ReLU here and there flips by rounding: torch's own gradients of a bias are
    then off by up to a hundredth, so only this comparison tells a mistake from rounding."""
    name, model, _, path, images, rules = case
    labels = np.array([3, 700])
    with jax.enable_x64(True):
        widen = lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf
        frozen = jax.tree.map(widen, eqzoo.load(path, name=name))
        ours = gradients(frozen, jnp.asarray(images, jnp.float64), jnp.asarray(labels))
    theirs = torch_gradients(copy.deepcopy(model).double(), images.astype(np.float64), labels)
    assert_same_gradients(parameters(ours), theirs, rules, 1e-6)


def test_gradients_of_a_cross_entropy_at_224(case):
    """Of all parameters together."""
    name, model, _, path, images, rules = case
    labels = np.array([3, 700])
    ours = unfill(parameters(gradients(eqzoo.load(path, name=name), jnp.asarray(images), jnp.asarray(labels))), rules)
    theirs = {key: value.grad.numpy() for key, value in torch_gradients(model, images, labels).named_parameters()}
    flat = lambda named: np.concatenate([named[key].ravel() for key in theirs])
    assert np.linalg.norm(flat(ours) - flat(theirs)) <= 1e-3 * np.linalg.norm(flat(theirs))


def parameters(tree):
    return tree.model if isinstance(tree, eqzoo.Frozen) else tree


def test_a_folder_is_read_like_its_file(case):
    name, _, folder, path, *_ = case
    assert eqx.tree_equal(eqzoo.load(folder, name=name), eqzoo.load(path, name=name))


def test_the_pair_for_training_has_the_files_statistics(case):
    name, model, _, path, _, rules = case
    pair = eqzoo.load(path, name=name, trainable=True)
    assert len(pair) == 2
    back = unfill(eqzoo._model._merge(*pair), rules)
    assert all(np.array_equal(back[key], value.numpy()) for key, value in model.state_dict().items())


def test_a_truncated_file_says_so(case):
    name, _, folder, path, *_ = case
    short = folder / "short" / path.name
    short.parent.mkdir()
    short.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=path.name) as caught:
        eqzoo.load(short, name=name)
    assert "\n" not in str(caught.value)


def test_another_models_file_is_refused_with_both_sides(case):
    name, _, _, path, *_ = case
    other = {"resnet50": "resnet101", "vit_small_patch16_224": "vit_base_patch16_224"}[name]
    with pytest.raises(CheckpointError, match=f"does not fit {other}: ") as caught:
        eqzoo.load(path, name=other)
    assert "pass the `name` of the model the file was made for" in str(caught.value)
