"""Int8 layers are within half a step of the layers they were, a quarter of their size, and work like them."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import eqzoo
from eqzoo import CheckpointError, nn
from eqzoo import __main__ as cli
from eqzoo.tree.arithmetic import cast
from eqzoo.tree.int8 import Int8, dequantize, quantize, stored_as_int8
from eqzoo.tree.paths import leaves_with_paths
from eqzoo.tree.select import is_float, select
from tests.contract.table import BATCH, KINDS, assert_close, jitted_train_step, randomised

KEY = jax.random.key(0)
LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding)
ROW = {row.model.__name__: row for row in KINDS}


@pytest.fixture(scope="module", params=KINDS, ids=lambda row: row.model.__name__)
def subject(request):
    """A row with its model, its model quantized, and the state of both."""
    model, state = randomised(request.param, seed=0)
    return request.param, model, quantize(model, "*"), state


def is_layer(node):
    return isinstance(node, (*LAYERS, Int8))


def layers(model):
    return [node for node in jax.tree.leaves(model, is_leaf=is_layer) if is_layer(node)]


# One layer

SINGLE = {
    "linear": (nn.Linear(6, 5, key=KEY), (6,)),
    "linear over rows": (nn.Linear(6, 5, key=KEY), (4, 6)),
    "linear without bias": (nn.Linear(6, 5, use_bias=False, key=KEY), (6,)),
    "equinox": (eqx.nn.Linear(6, 5, key=KEY), (6,)),
    "equinox to a scalar": (eqx.nn.Linear(6, "scalar", key=KEY), (6,)),
    "convolution": (nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2, key=KEY), (7, 5, 6)),
    "embedding": (nn.Embedding(9, 4, key=KEY), None),
}


@pytest.mark.parametrize("case", SINGLE)
def test_a_layer_computes_with_its_rounded_weight(case):
    layer, shape = SINGLE[case]
    x = jnp.array([[0, 8], [3, 3]]) if shape is None else jax.random.normal(KEY, shape)
    small = Int8(layer)
    assert small.layer.weight.dtype == jnp.int8
    assert jax.tree.structure(small.layer) == jax.tree.structure(layer)
    channels = small.scale.shape[0]
    assert small.scale.shape == (channels,) + (1,) * (layer.weight.ndim - 1)
    assert channels == layer.weight.shape[0]
    # The largest weight of each channel takes the whole range.
    steps = np.abs(np.asarray(small.layer.weight, int)).reshape(channels, -1)
    assert np.all(steps.max(axis=1) == 127)
    assert np.all(np.abs(small.weight - layer.weight) <= 0.5001 * small.scale)
    rounded = eqx.tree_at(lambda layer: layer.weight, layer, small.weight)
    assert np.array_equal(small(x), rounded(x))
    assert_close(small(x), layer(x), 0.03)
    if hasattr(layer, "bias"):
        assert small.bias is layer.bias


def test_a_layer_of_zeros_stays_one():
    """A channel of zeros, and one of numbers too small for float16 to have a scale for, divide by nothing."""
    weight = jnp.array([[0.0, 0.0], [1.0, -2.0], [0.0, 1e-6]])
    for dtype in (jnp.float32, jnp.float16):
        layer = eqx.tree_at(lambda layer: layer.weight, nn.Linear(2, 3, key=KEY), weight.astype(dtype))
        small = Int8(layer)
        assert np.all(small.scale > 0)
        assert np.array_equal(small.weight[0], [0, 0])
        assert_close(small.weight, weight, 0.01)


@pytest.fixture
def optimised():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_from_the_scale_as_it_is_stored(dtype):
    """The layer computes in its own dtype, and the scale's rounding adds nothing to the error."""
    layer = nn.Linear(64, 5000, key=KEY)  # of this size, XLA would skip roundings
    layer = jax.tree.map(lambda leaf: (leaf * 10).astype(dtype), layer)
    small = Int8(layer)
    assert small.scale.dtype == small.weight.dtype == small(jnp.ones(64, dtype)).dtype == dtype
    exact = np.asarray(small.layer.weight, float) * np.asarray(small.scale, float)
    assert np.all(np.abs(exact - np.asarray(layer.weight, float)) <= 0.5 * np.asarray(small.scale, float))


# Stacks and ensembles

STACK = nn.Stack(lambda key: nn.MLP(4, 6, activation=nn.gelu, key=key), 3, key=KEY)


def test_each_layer_of_a_stack_and_each_member_of_an_ensemble_has_its_own_scales():
    ensemble = eqx.filter_vmap(lambda key: nn.Linear(4, 6, key=key))(jax.random.split(KEY, 3))
    for many, single in (
        (ensemble, quantize(ensemble, nn.Linear)),
        (STACK.block.fc1, quantize(STACK, "*fc1*").block.fc1),
    ):
        assert single.scale.shape == (3, 6, 1)
        for index in range(3):
            pick = lambda leaf, index=index: leaf[index]
            assert eqx.tree_equal(jax.tree.map(pick, single), Int8(jax.tree.map(pick, many)))


def test_a_layer_of_a_stack_is_float_in_its_turn_only():
    """Neither forward nor backward holds the float weights of all layers."""
    small = quantize(STACK, nn.Linear)
    loss = lambda x, scale: jnp.sum(eqx.tree_at(lambda s: s.block.fc1.scale, small, scale)(x) ** 2)
    for program in (small, jax.grad(loss, argnums=(0, 1))):
        arguments = (jnp.ones((2, 4)), small.block.fc1.scale)[: 1 if program is small else 2]
        held = _shapes(jax.make_jaxpr(program)(*arguments).jaxpr)
        assert ("int8", (3, 6, 4)) in held
        assert ("float32", (6, 4)) in held
        assert ("float32", (3, 6, 4)) not in held
        assert ("float32", (3, 4, 6)) not in held


def _shapes(jaxpr) -> set[tuple[str, Any]]:
    """Dtype and shape of everything that a program computes, inside of its loops too."""
    found = {(str(v.aval.dtype), v.aval.shape) for v in (*jaxpr.invars, *jaxpr.constvars)}
    for equation in jaxpr.eqns:
        found |= {(str(v.aval.dtype), v.aval.shape) for v in equation.outvars}
        for inner in jaxprs_in_params(equation.params):
            found |= _shapes(inner)
    return found


# Models


def test_every_weight_is_within_half_a_step(subject):
    _, model, small, _ = subject
    assert len(stored_as_int8(small)) == len(layers(small)) == len(layers(model)) > 0
    for before, after in zip(layers(model), layers(small), strict=True):
        assert isinstance(after, Int8)
        assert np.all(np.abs(after.weight - before.weight) <= 0.5001 * after.scale)


def test_a_quarter_of_the_bytes(subject):
    _, model, small, _ = subject
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
    weights = sum(layer.weight.nbytes for layer in layers(model))
    scales = sum(layer.scale.nbytes for layer in layers(small))
    assert nbytes(model) - nbytes(small) == weights - weights // 4 - scales


def test_outputs_stay_close(subject):
    """Under `jit` and `vmap`, in inference mode: as those of the rounded floats, and within 2 % of the model's."""
    row, model, small, state = subject
    call = eqx.filter_jit(lambda model, xs: jax.vmap(eqzoo.freeze(model, state))(xs))
    xs = row.batch(1)
    outputs, rounded, expected = call(small, xs), call(dequantize(small), xs), call(model, xs)
    assert_close(outputs, rounded, 1e-5)
    assert_close(outputs, expected, 0.02)
    assert not np.allclose(outputs, expected, rtol=1e-4)


def test_dequantize_gives_the_same_layers_back(subject):
    _, model, small, _ = subject
    floats = dequantize(small)
    assert jax.tree.structure(floats) == jax.tree.structure(model)
    dtypes = lambda tree: jax.tree.map(lambda leaf: getattr(leaf, "dtype", leaf), tree)
    assert eqx.tree_equal(dtypes(floats), dtypes(model))
    assert eqx.tree_equal(dequantize(floats), floats)


def test_the_rest_can_be_trained(subject):
    """Through scans, checkpoints and batch norms: the gradients are those of the rounded floats."""
    row, _, small, state = subject
    keys = jax.random.split(KEY, BATCH)
    *_, gradients = jitted_train_step(small, state, row.batch(1), keys)
    *_, expected = jitted_train_step(dequantize(small), state, row.batch(1), keys)
    ours = {path.replace(".layer.", "."): leaf for path, leaf in leaves_with_paths(gradients)}
    theirs = {path: leaf for path, leaf in leaves_with_paths(expected) if path in ours}
    scales = {path for path in ours if path.endswith(".scale")}
    weights = {f"{path}.weight" for path in stored_as_int8(small)}
    assert set(ours) - scales == set(theirs) == {path for path, _ in leaves_with_paths(expected)} - weights
    assert_close({path: ours[path] for path in theirs}, theirs, 1e-3)
    assert all(np.any(ours[path] != 0) for path in scales)


def test_masks_see_no_float_in_an_int8_weight(subject):
    _, _, small, _ = subject
    floats = select(small, lambda path, leaf: is_float(leaf))
    stored = {f"{path}.layer.weight" for path in stored_as_int8(small)}
    for path, is_it in leaves_with_paths(floats):
        assert is_it == (path not in stored and not path.endswith("inference")), path


def test_under_jit_and_of_shapes_alone():
    """A skeleton becomes the skeleton of the quantized model; compiled, a weight may round to the next step."""
    model, _ = randomised(ROW["ViT"], seed=0)
    skeleton, _ = ROW["ViT"].skeleton()
    small = quantize(model, "*")
    shapes = quantize(skeleton, "*")
    assert eqx.tree_equal(shapes, eqx.filter_eval_shape(lambda: small))
    assert eqx.tree_equal(shapes, eqx.filter_eval_shape(quantize, model, "*"))
    compiled = eqx.filter_jit(quantize)(model, "*")
    for ours, theirs in zip(layers(compiled), layers(small), strict=True):
        assert_close(ours.scale, theirs.scale, 1e-6)
        assert np.abs(np.asarray(ours.layer.weight, int) - np.asarray(theirs.layer.weight, int)).max() <= 1


def test_any_pytree():
    tree = {"layers": [eqx.nn.Linear(2, 3, key=KEY), eqx.nn.Linear(3, 2, key=KEY)], "rate": 0.1, "name": "net"}
    small = quantize(tree, "layers.1")
    assert stored_as_int8(small) == ["layers.1"]
    assert small["layers"][0] is tree["layers"][0]
    assert stored_as_int8(quantize(tree, lambda path, leaf: path.endswith("weight"))) == ["layers.0", "layers.1"]
    assert stored_as_int8(quantize(nn.Linear(2, 2, key=KEY), "weight")) == [""]


def test_nothing_to_quantize():
    model, _ = ROW["ViT"].skeleton()
    with pytest.raises(
        ValueError, match=r"nothing selected is the weight of an eqzoo.nn.Linear, .*; here one could"
    ) as e:
        quantize(model, nn.LayerNorm)
    assert str(e.value).endswith(
        "patch_embed.conv, blocks[*].attention.query, blocks[*].attention.key, blocks[*].attention.value, "
        "blocks[*].attention.out and 3 more"
    )
    with pytest.raises(ValueError, match="could quantize nothing$"):
        quantize({"a": jnp.ones(3)}, "a")


def test_quantized_already():
    model, _ = ROW["ViT"].skeleton()
    small = quantize(model, "head")
    with pytest.raises(ValueError, match="head.layer.weight is int8 already; leave it out of `where`, or `dequantize`"):
        quantize(small, nn.Linear)
    assert stored_as_int8(quantize(small, "*.mlp")) == ["blocks[*].mlp.fc1", "blocks[*].mlp.fc2", "head"]


def test_bfloat16_is_a_storage_too(subject, compile_as_users_do):
    """With bfloat16 parameters and a float32 input, every activation is float32: what the rounded weights compute, bit
    for bit. A language model's first activations are rows of its tables, so these stay float32 for that."""
    row, model, _, state = subject
    tables = ("embedding", "positions") if isinstance(model, eqzoo.GPT2) else None
    half = cast(model, jnp.bfloat16, keep=tables)
    call = eqx.filter_jit(lambda model, xs: jax.vmap(eqzoo.freeze(model, state))(xs))
    xs = row.batch(1)
    outputs = call(half, xs)
    assert outputs.dtype == jnp.float32
    assert np.array_equal(outputs, call(cast(half, jnp.float32), xs))
    assert_close(outputs, call(model, xs), 0.02)


# Files


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_save_is_load(subject, dtype, tmp_path):
    """Bit for bit, from nothing but the file, whose size is a quarter."""
    _, model, _, state = subject
    model = cast(model, dtype)
    small = quantize(model, "*")
    path = tmp_path / "m.safetensors"
    eqzoo.save(path, small, state)
    assert eqx.tree_equal(eqzoo.load(path, trainable=True), (small, state))
    assert eqx.tree_equal(eqzoo.load(path), eqzoo.freeze(small, state))
    assert eqx.tree_equal(eqzoo.load(path, like=(small, state), trainable=True), (small, state))
    eqzoo.save(tmp_path / "floats.safetensors", model, state)
    weights = sum(layer.weight.nbytes for layer in layers(model))
    scales = sum(layer.scale.nbytes for layer in layers(small))
    sizes = [_numbers_in(tmp_path / name) for name in ("floats.safetensors", "m.safetensors")]
    assert sizes[0] - sizes[1] == weights - weights // dtype.dtype.itemsize - scales


def _numbers_in(path):
    """The bytes of a safetensors file behind its header."""
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A ViT with its first block's MLPs and its head stored as int8."""
    model, state = randomised(ROW["ViT"], seed=0)
    small = quantize(model, ("*.mlp", "head", "patch_embed"))
    path = tmp_path_factory.mktemp("int8") / "vit.safetensors"
    eqzoo.save(path, small, state)
    return path, small


def test_load_with_a_dtype_leaves_int8_as_it_is(file):
    path, small = file
    half = eqzoo.load(path, dtype=jnp.bfloat16, trainable=True)[0]
    assert eqx.tree_equal(half, cast(small, jnp.bfloat16))
    assert half.head.layer.weight.dtype == jnp.int8
    assert half.head.weight.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changes", "layer"),
    [({"num_classes": 3}, "head"), ({"num_classes": 0}, "head"), ({"in_channels": 1}, "patch_embed.conv")],
    ids=str,
)
def test_load_does_not_adapt_an_int8_layer(file, changes, layer):
    (field,) = changes
    with pytest.raises(
        ValueError, match=rf"load: {field} of ViT can't be changed on the way, for {layer} is stored as"
    ):
        eqzoo.load(file[0], **changes)


def test_load_adapts_what_is_float(file, tmp_path):
    path, small = file
    larger = eqzoo.load(path, image_size=16, num_classes=8, trainable=True)[0]  # it has 8 already
    assert larger.positions.shape[0] == small.positions.shape[0] - 9 + 16
    assert eqx.tree_equal((larger.blocks, larger.head), (small.blocks, small.head))
    model, state = randomised(ROW["ViT"], seed=0)
    eqzoo.save(tmp_path / "m.safetensors", quantize(model, "blocks*"), state)
    other = eqzoo.load(tmp_path / "m.safetensors", num_classes=3, trainable=True)[0]
    assert other.head.weight.shape == (3, 16)
    assert len(stored_as_int8(other)) == 6


def test_a_file_is_refused_where_the_model_is_another(file, tmp_path):
    """A model given as `like` is kept as it is, and a file that lacks a scale doesn't fit."""
    path, small = file
    with pytest.raises(CheckpointError, match=r"\n    head\.layer\.weight"):
        eqzoo.load(path, like=dequantize(small))
    tensors, metadata = eqzoo.checkpoint.open_checkpoint(path)
    arrays = {name: tensor.read() for name, tensor in tensors.items() if name != "head.scale"}
    eqzoo.checkpoint.write_safetensors(tmp_path / "m.safetensors", arrays, metadata)
    with pytest.raises(CheckpointError, match=r"missing from the file:\n    head\.scale \(8, 1\)"):
        eqzoo.load(tmp_path / "m.safetensors")


class Own(eqx.Module):
    blocks: nn.Stack[nn.Linear]

    def __init__(self, *, key):
        self.blocks = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=key)

    def __call__(self, x, *, key=None):
        return self.blocks(x)


def test_a_class_of_ones_own(tmp_path):
    small = quantize(Own(key=KEY), nn.Linear)
    eqzoo.save(tmp_path / "own.safetensors", small)
    loaded, _ = eqzoo.load(tmp_path / "own.safetensors", name=f"{__name__}:Own", trainable=True)
    assert eqx.tree_equal(loaded, small)


def test_the_command_line(file, capsys, tmp_path):
    """`check` knows the model, and `convert` keeps int8 in eqzoo's own format."""
    path, small = file
    assert cli.main(["check", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["fits"]) == 1
    assert cli.main(["convert", str(path), str(tmp_path / "again.safetensors")]) == 0
    assert eqx.tree_equal(eqzoo.load(tmp_path / "again.safetensors", trainable=True)[0], small)


@pytest.mark.parametrize("format", ["timm", "transformers"])
def test_export_asks_for_floats(file, format, tmp_path):
    with pytest.raises(ValueError, match=rf"export: {format} doesn't know int8 .*`eqzoo.tree.dequantize\(model\)`"):
        eqzoo.export(tmp_path / "m.safetensors", file[1], format=format)
