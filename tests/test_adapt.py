"""`load` with other classes, channels, sizes, dtypes or devices than a checkpoint's: timm's numbers, or a clear no."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import adapt_input_conv
from timm.models._hub import save_for_hf

import eqzoo
from eqzoo import CheckpointError
from eqzoo._model import _merge
from eqzoo.checkpoint import adapt, unfill
from eqzoo.models.vision._vit_upstream import TIMM
from eqzoo.models.vision.resnet import ResNetConfig
from eqzoo.sharding import make_mesh, shardings
from eqzoo.tree import leaves_with_paths
from tests.parity import assert_close, randomise

SIZES = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32, "num_classes": 5}
UPSTREAM = {
    "vit": ("vit_tiny_patch16_224", SIZES),
    "distilled": ("deit_tiny_distilled_patch16_224", SIZES),
    "class token without position": ("deit3_small_patch16_224", SIZES),
    "registers without positions": ("vit_betwixt_patch16_reg4_gap_256", SIZES),
    "registers with positions": ("vit_tiny_patch16_224", {**SIZES, "reg_tokens": 2}),
    "one channel": ("vit_tiny_patch16_224", {**SIZES, "in_chans": 1}),
    "resnet": ("resnet18", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "num_classes": 5}),
    "resnet d": (
        "resnet18d",
        {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "stem_width": 8, "num_classes": 5},
    ),
}
VITS = [case for case in UPSTREAM if "resnet" not in case and case != "one channel"]
NAMES = {"num_classes": "num_classes", "in_channels": "in_chans", "image_size": "img_size"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each model as timm saves it."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("timm")
    for case, (name, options) in UPSTREAM.items():
        model = randomise(timm.create_model(name, **options), 0)
        save_for_hf(model, root / case, safe_serialization=True)
    return root


def in_timm(folder: Any, changes: dict[str, Any]) -> torch.nn.Module:
    """timm's own way to the changed model; a new head is random there and set to zero."""
    options = {NAMES[field]: value for field, value in changes.items()}
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()
    if changes.get("num_classes", 5) != 5:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith(("head", "fc.")):
                    parameter.zero_()
    return model


@eqx.filter_jit
def outputs(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def assert_as_timm(folder: Any, changes: dict[str, Any], of_logits: bool = True) -> Any:
    """The model as `load` adapts it, once its weights and logits were found to be timm's."""
    upstream = in_timm(folder, changes)
    pair = eqzoo.load(folder, trainable=True, **changes)
    assert {field: getattr(pair[0].config, field) for field in changes} == changes
    rules = eqzoo._registry.family_of(pair[0]).rules["timm"]
    ours, theirs = unfill(_merge(*pair), rules), upstream.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tuple(tensor.shape), name
        assert np.abs(ours[name] - tensor.numpy()).max() <= 1e-6 * max(np.abs(tensor.numpy()).max(), 1e-6), name
    if of_logits:
        config = pair[0].config
        size = getattr(config, "image_size", 32)
        x = np.random.default_rng(0).normal(size=(2, size, size, config.in_channels)).astype(np.float32)
        with torch.no_grad():
            expected = upstream(torch.tensor(x).permute(0, 3, 1, 2))
        if expected.numel():
            logits = outputs(eqzoo.freeze(*pair), x)
            assert_close(logits, expected, 1e-4) if expected.any() else np.testing.assert_array_equal(logits, 0)
    return pair[0]


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
@pytest.mark.parametrize("case", ["vit", "resnet", "resnet d"])
def test_channels_are_mixed_as_timm_does(case, channels, folders):
    assert_as_timm(folders / case, {"in_channels": channels}, of_logits=channels == 4)


@pytest.mark.parametrize("size", [16, 40])
@pytest.mark.parametrize("case", VITS)
def test_positions_are_resampled_as_timm_does(case, size, folders):
    assert_as_timm(folders / case, {"image_size": size}, of_logits=size == 40)


@pytest.mark.parametrize("classes", [0, 3, 5])
@pytest.mark.parametrize("case", ["vit", "distilled", "resnet"])
def test_a_head_is_kept_where_it_fits_and_zero_or_gone_otherwise(case, classes, folders):
    model = assert_as_timm(folders / case, {"num_classes": classes}, of_logits=classes in (0, 5))
    heads = [model.head, model.distillation_head] if case == "distilled" else [model.head]
    if classes == 0:
        assert heads == [None] * len(heads)
    else:
        zero = [not (head.weight.any() or head.bias.any()) for head in heads]
        assert zero == [classes != 5] * len(heads)


@pytest.mark.parametrize("case", ["distilled", "registers without positions", "class token without position"])
def test_all_three_at_once(case, folders):
    changes = {"num_classes": 3, "in_channels": 4, "image_size": 48}
    assert_as_timm(folders / case, changes)
    assert_as_timm(folders / case, {**changes, "num_classes": 0})


def test_more_channels_can_not_be_made_of_one(folders):
    with pytest.raises(
        ValueError, match="in_channels=4 is made of a checkpoint's 3 channels, but this one has 1; load"
    ):
        eqzoo.load(folders / "one channel", in_channels=4)
    assert eqzoo.load(folders / "one channel", in_channels=1).config.in_channels == 1


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(("old", "new"), [(3, 1), (3, 2), (3, 4), (3, 8), (4, 1)])
def test_mix_channels_is_adapt_input_conv(old, new, dtype):
    weight = np.random.default_rng(0).normal(size=(6, old, 3, 3)).astype(dtype)
    configs = [ResNetConfig(block="basic", depths=(1,), widths=(6,), in_channels=channels) for channels in (old, new)]
    leaf = jax.ShapeDtypeStruct((6, new, 3, 3), dtype)
    ours = adapt.mix_channels(weight, leaf, *configs)
    tensor = torch.tensor(weight.astype(np.float32)).to(torch.bfloat16 if dtype == jnp.bfloat16 else torch.float32)
    theirs = adapt_input_conv(new, tensor, base_chans=old).float().numpy()
    assert ours.dtype == weight.dtype
    np.testing.assert_allclose(ours.astype(np.float32), theirs, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations([1, 2, 5, 16, 37], 2)))
def test_resample_grid_is_resample_abs_pos_embed(old, new):
    table = np.random.default_rng(0).normal(size=(old * old, 6)).astype(np.float32)
    ours = adapt.resample_grid(table, new * new)
    theirs = resample_abs_pos_embed(torch.tensor(table)[None], [new, new], [old, old], num_prefix_tokens=0)[0]
    assert_close(ours, theirs, 1e-6)


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory):
    """A bare file of a ResNet-18 with ten classes."""
    path = tmp_path_factory.mktemp("files") / "resnet18.safetensors"
    pair = eqzoo.create("resnet18", num_classes=10, key=jax.random.key(0))
    eqzoo.export(path, *pair, format="torchvision")
    return path, pair


@pytest.mark.parametrize("classes", [0, 5, 10])
def test_a_fine_tuned_file_with_a_name(fine_tuned, classes):
    path, (model, state) = fine_tuned
    ours, our_state = eqzoo.load(path, name="resnet18", num_classes=classes, trainable=True)
    assert eqx.tree_equal((ours.stem, ours.stages), (model.stem, model.stages))
    assert eqx.tree_equal(our_state, state)
    if classes == 0:
        assert ours.head is None
    else:
        assert ours.head.weight.shape == (classes, 512)
        assert eqx.tree_equal(ours.head, model.head) if classes == 10 else not ours.head.weight.any()


def test_without_num_classes_the_report_says_which_head_the_file_has(fine_tuned):
    with pytest.raises(CheckpointError, match="does not fit resnet18") as caught:
        eqzoo.load(fine_tuned[0], name="resnet18")
    assert "its head is for 10 classes: pass `num_classes=10` to keep it, or the number you want" in str(caught.value)


@pytest.mark.parametrize("classes", [0, 5])
def test_a_file_without_head_gets_the_one_asked_for(classes, fine_tuned, tmp_path):
    model, state = eqzoo.load(fine_tuned[0], name="resnet18", num_classes=0, trainable=True)
    eqzoo.export(tmp_path / "x.pth", model, state, format="timm")
    ours = eqzoo.load(tmp_path / "x.pth", name="resnet18", num_classes=classes)
    assert (ours.head is None) if classes == 0 else (ours.head.weight.shape == (5, 512) and not ours.head.weight.any())


@pytest.mark.parametrize("made", [{"in_channels": 1}, {"image_size": 48}, {"in_channels": 1, "image_size": 48}])
def test_what_the_file_has_already_is_not_adapted_again(made, folders, tmp_path, caplog):
    """The file was fine-tuned after a change that its description doesn't tell of."""
    model, state = eqzoo.load(folders / "vit", trainable=True, **made)
    eqzoo.export(tmp_path / "model.safetensors", model, state, format="timm")
    (tmp_path / "config.json").write_text((folders / "vit" / "config.json").read_text())
    with caplog.at_level("INFO", "eqzoo"):
        ours, _ = eqzoo.load(tmp_path, in_channels=1, image_size=48, num_classes=3, trainable=True)
    assert len(caplog.messages) == 3 - len(made)
    expected, _ = eqzoo.load(folders / "vit", in_channels=1, image_size=48, num_classes=3, trainable=True)
    assert eqx.tree_equal(ours, expected)


def test_every_change_is_logged(folders, caplog):
    with caplog.at_level("INFO", "eqzoo"):
        eqzoo.load(folders / "distilled", num_classes=0, in_channels=1, image_size=48)
    assert [record.name for record in caplog.records] == ["eqzoo"] * 3
    label = "deit_tiny_distilled_patch16_224"
    heads = "head.weight, head.bias, distillation_head.weight, distillation_head.bias"
    assert sorted(caplog.messages) == [
        f"{label}: image_size 32 -> 48, adapts positions",
        f"{label}: in_channels 3 -> 1, adapts patch_embed.conv.weight",
        f"{label}: num_classes 5 -> 0, removes {heads}",
    ]


def test_what_is_not_changed_is_not_logged(folders, caplog):
    with caplog.at_level("INFO", "eqzoo"):
        eqzoo.load(folders / "vit", num_classes=5, in_channels=3, image_size=32)
    assert not caplog.messages


def test_an_image_size_of_a_resnet_is_refused(folders):
    with pytest.raises(TypeError, match="resnet18 has no option 'image_size'; it has block, depths"):
        eqzoo.load(folders / "resnet", image_size=64)


def test_an_unknown_change_is_refused(folders):
    with pytest.raises(TypeError, match="classes"):
        eqzoo.load(folders / "vit", classes=3)


def test_an_image_size_must_be_a_multiple_of_the_patch(folders):
    with pytest.raises(ValueError, match="image_size=36 is not a multiple of patch_size=8; the nearest below is 32"):
        eqzoo.load(folders / "vit", image_size=36)


def test_an_image_size_of_an_mlp_can_not_be_changed_on_the_way(tmp_path):
    """Its first layer's weight has no grid to resample."""
    pair = eqzoo.create("mlp", hidden=(4,), image_size=8, key=jax.random.key(0))
    eqzoo.save(tmp_path / "mlp.safetensors", *pair)
    with pytest.raises(ValueError, match="load: image_size of MLP is 8 and can't be changed on the way, .*no adapter"):
        eqzoo.load(tmp_path / "mlp.safetensors", image_size=16)
    assert eqzoo.load(tmp_path / "mlp.safetensors", image_size=8, num_classes=3).config.num_classes == 3


def test_a_model_given_as_like_is_not_changed(folders):
    model, state = eqzoo.load(folders / "vit", trainable=True)
    with pytest.raises(ValueError, match="load: num_classes can't change the model given as `like`"):
        eqzoo.load(folders / "vit", like=(model, state), num_classes=3)


def test_an_own_file_is_adapted_in_its_own_dtype(folders, tmp_path):
    """The new head too, so that the model doesn't mix dtypes."""
    model, state = eqzoo.load(folders / "vit", dtype=jnp.bfloat16, trainable=True)
    eqzoo.save(tmp_path / "x.safetensors", model, state)
    ours = eqzoo.load(tmp_path / "x.safetensors", num_classes=3, in_channels=1, image_size=16)
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(ours, eqx.is_array))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("case", "dtype", "changes"),
    [
        ("vit", jnp.bfloat16, {}),
        ("vit", "float16", {"in_channels": 1, "num_classes": 2}),
        ("resnet", "float16", {}),
        ("resnet", jnp.bfloat16, {"in_channels": 1, "num_classes": 2}),
    ],
)
def test_dtype_is_that_of_parameters_and_not_of_statistics(case, dtype, changes, folders):
    model, state = eqzoo.load(folders / case, dtype=dtype, trainable=True, **changes)
    exact, exact_state = eqzoo.load(folders / case, trainable=True, **changes)
    expected = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, exact)
    assert {str(x.dtype) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))} == {str(jnp.dtype(dtype))}
    if changes:  # the sum over channels is taken of rounded numbers
        near = lambda x, y: np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.02, atol=0.02
        )
        jax.tree.map(near, eqx.filter(model, eqx.is_array), eqx.filter(expected, eqx.is_array))
    else:
        assert eqx.tree_equal(model, expected)
    assert eqx.tree_equal(state, exact_state)
    assert {str(x.dtype) for x in jax.tree.leaves(state) if eqx.is_array(x)} <= {"float32", "int32"}


@pytest.mark.parametrize("dtype", [jnp.int8, "float64", bool, np.complex64])
def test_a_dtype_that_parameters_can_not_have_is_refused(dtype, folders):
    with pytest.raises(ValueError, match="load: dtype=.* is no floating dtype that JAX has enabled; pass one such as"):
        eqzoo.load(folders / "vit", dtype=dtype)


@pytest.mark.parametrize(
    ("case", "changes"), [("vit", {"num_classes": 8, "in_channels": 4}), ("vit", {}), ("resnet", {})]
)
def test_a_mesh_places_each_leaf_by_the_familys_rules(case, changes, folders):
    mesh = make_mesh(data=2, fsdp=2, model=2)
    model, state = eqzoo.load(folders / case, sharding=mesh, trainable=True, **changes)
    plain, plain_state = eqzoo.load(folders / case, trainable=True, **changes)
    assert eqx.tree_equal(jax.device_get(model), jax.device_get(plain))
    assert eqx.tree_equal(jax.device_get(state), jax.device_get(plain_state))
    wanted = dict(leaves_with_paths(shardings(plain, mesh)))
    arrays = [(path, leaf) for path, leaf in leaves_with_paths(model) if eqx.is_array(leaf)]
    assert {path: leaf.sharding for path, leaf in arrays} == {path: wanted[path] for path, _ in arrays}
    assert any(not leaf.sharding.is_fully_replicated for _, leaf in arrays)
    for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array)):
        assert leaf.sharding == NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize("kind", ["one device", "all devices"])
def test_one_sharding_is_for_every_leaf(kind, folders):
    if kind == "one device":
        sharding = SingleDeviceSharding(jax.devices()[3])
    else:
        sharding = NamedSharding(make_mesh(data=8), PartitionSpec())
    pair = eqzoo.load(folders / "resnet", sharding=sharding, num_classes=8, trainable=True)
    assert {leaf.sharding for leaf in jax.tree.leaves(eqx.filter(pair, eqx.is_array))} == {sharding}
    plain = eqzoo.load(folders / "resnet", num_classes=8, trainable=True)
    assert eqx.tree_equal(jax.device_get(pair), jax.device_get(plain))


def test_dtype_and_mesh_together(folders):
    mesh = make_mesh(data=2, fsdp=2, model=2)
    model, _ = eqzoo.load(folders / "vit", sharding=mesh, dtype=jnp.bfloat16, image_size=16, trainable=True)
    assert model.positions.dtype == model.head.weight.dtype == jnp.bfloat16
    assert len(model.positions.sharding.device_set) == 8
    names = unfill(model, TIMM)
    plain, _ = eqzoo.load(folders / "vit", dtype=jnp.bfloat16, image_size=16, trainable=True)
    assert all(np.array_equal(names[name], array) for name, array in unfill(plain, TIMM).items())
