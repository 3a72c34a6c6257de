"""Swin is torchvision's and timm's, V1 and V2: every variant's names, shapes, options and maps; outputs and gradients
of every option, whatever the image's size; windows, tables and shifts for another image size."""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.models.swin_transformer import SwinTransformer as TimmV1
from timm.models.swin_transformer import checkpoint_filter_fn
from timm.models.swin_transformer_v2 import SwinTransformerV2 as TimmV2
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo._model import _skeleton, freeze
from eqzoo._save import _stored
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._swin_upstream import MICROSOFT, TIMM, TORCHVISION
from eqzoo.models.vision.swin import FAMILY, VARIANTS, Swin, SwinConfig
from eqzoo.tree import leaves_with_paths
from tests.contract.table import matches
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    filled,
    from_torch,
    randomise,
)

TORCHVISION_VARIANTS = [name for name in VARIANTS if name.startswith(("swin_v2_", "swin_")) and len(name) <= 9]
TIMM_VARIANTS = [name for name in VARIANTS if name not in TORCHVISION_VARIANTS]

KNOWN = {
    *("SwinTransformer", "SwinTransformerV2", "SwinTransformerStage", "SwinTransformerV2Stage", "SwinTransformerBlock"),
    *("SwinTransformerBlockV2", "SwinTransformerV2Block", "PatchEmbed", "PatchMerging", "PatchMergingV2"),
    *("ShiftedWindowAttention", "ShiftedWindowAttentionV2", "WindowAttention", "Mlp", "MLP", "StochasticDepth"),
    *("DropPath", "Dropout", "Sequential", "ModuleList", "Conv2d", "Linear", "LayerNorm", "GELU", "ReLU", "Softmax"),
    *("Permute", "Identity", "ClassifierHead", "SelectAdaptivePool2d", "FastAdaptiveAvgPool", "AdaptiveAvgPool2d"),
    "Flatten",
}


def known_and_of_one_epsilon(upstream: torch.nn.Module) -> bool:
    norms = [module for module in upstream.modules() if isinstance(module, torch.nn.LayerNorm)]
    return {type(module).__name__ for module in upstream.modules()} <= KNOWN and {norm.eps for norm in norms} == {1e-5}


def config_of(model: Any) -> SwinConfig:
    """The config of a timm model, read off the model itself."""
    blocks = [list(stage.blocks) for stage in model.layers]
    first = blocks[0][0]
    version = 2 if isinstance(model, TimmV2) else 1
    pretrained = tuple(block[0].attn.pretrained_window_size[0] for block in blocks) if version == 2 else ()
    drop_path = blocks[-1][-1].drop_path1
    return SwinConfig(
        version=version,
        dim=model.embed_dim,
        depths=tuple(map(len, blocks)),
        heads=tuple(block[0].attn.num_heads for block in blocks),
        windows=tuple(window for window, _ in model._ref_window_sizes),
        pretrained_windows=pretrained if any(pretrained) else (),
        patch_size=model.patch_embed.patch_size[0],
        image_size=model.patch_embed.img_size[0],
        in_channels=model.in_chans,
        mlp_ratio=first.mlp_ratio,
        qkv_bias=(first.attn.q_bias if version == 2 else first.attn.qkv.bias) is not None,
        drop_path=round(getattr(drop_path, "drop_prob", 0.0), 6),
        num_classes=model.num_classes,
    )


@pytest.mark.parametrize("name", {name: VARIANTS[name] for name in TIMM_VARIANTS})
def test_timm_variant_has_the_same_options_names_shapes_and_maps(name):
    config = VARIANTS[name]
    with torch.device("meta"):
        upstream: Any = timm.create_model(name)
    assert config_of(upstream) == config
    assert known_and_of_one_epsilon(upstream)
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    image = torch.empty(1, 3, config.image_size, config.image_size, device="meta")
    theirs = upstream.forward_intermediates(image, intermediates_only=True)
    ours = _maps(config, config.image_size, config.image_size)
    assert ours == [(*each.shape[2:], each.shape[1]) for each in theirs]
    model, _ = _skeleton(partial(Swin, config))
    for stage, theirs in zip(model.stages, upstream.layers, strict=True):
        assert (stage.blocks.block.window,) * 2 == theirs.blocks[0].window_size


def _maps(config: SwinConfig, height: int, width: int) -> list[tuple[int, ...]]:
    features = lambda: Swin(config, key=jax.random.key(0)).features(
        jnp.zeros((height, width, 3)), key=jax.random.key(1)
    )
    return [each.shape for each in eqx.filter_eval_shape(features)]


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_options_names_shapes_and_parameters(name):
    with torch.device("meta"):
        upstream: Any = torchvision.models.get_model(name)
    assert known_and_of_one_epsilon(upstream)
    stages = [
        each for each in upstream.features if hasattr(each[0] if isinstance(each, torch.nn.Sequential) else 0, "attn")
    ]
    last = stages[-1][-1]
    config = VARIANTS[name]
    assert config == SwinConfig(
        version=2 if isinstance(last, SwinTransformerBlockV2) else 1,
        dim=upstream.features[0][0].out_channels,
        depths=tuple(map(len, stages)),
        heads=tuple(stage[0].attn.num_heads for stage in stages),
        windows=tuple(stage[0].attn.window_size[0] for stage in stages),
        cut_windows=False,
        pad_first=True,
        image_size=torchvision.models.get_model_weights(name).DEFAULT.meta["min_size"][0],
        drop_path=last.stochastic_depth.p,
    )
    key_biases = sum(depth * dim for depth, dim in zip(config.depths, config.dims, strict=True)) * (config.version - 1)
    assert_names_and_shapes((FAMILY, config), upstream.state_dict(), unused=key_biases)
    model, _ = _skeleton(partial(Swin, config))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number + key_biases


# Ours beside timm's, and the sizes of images to try (those of another than the model's need timm's dynamic size).
TIMM_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "windows that fit": ({}, {}, (32, 32)),
    "maps that are padded, odd depths, other options": (
        {"image_size": 36, "depths": (3, 1), "windows": (4, 3), "mlp_ratio": 2.6, "in_channels": 1, "num_classes": 0},
        {"img_size": 36, "depths": (3, 1), "window_size": ((4, 4), (3, 3)), "mlp_ratio": 2.6, "in_chans": 1}
        | {"num_classes": 0},
        (36, 36),
    ),
    "windows that are cut": (
        {"image_size": 41, "windows": (12, 12), "patch_size": 5, "qkv_bias": False},
        {"img_size": 41, "window_size": 12, "patch_size": 5, "qkv_bias": False},
        (41, 41),
    ),
    "an image of another size": ({}, {"dynamic_img_size": True}, (28, 52)),
}
TORCHVISION_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "windows that fit": ({}, {}, (32, 32)),
    "one side of one window, the rest padded": (
        {"windows": (5, 5), "depths": (3, 2), "mlp_ratio": 2.6},
        {"window_size": [5, 5], "depths": [3, 2], "mlp_ratio": 2.6},
        (19, 54),
    ),
    "images smaller than a window": (
        {"windows": (7, 7), "patch_size": 3},
        {"window_size": [7, 7], "patch_size": [3, 3]},
        (11, 17),
    ),
}


def tiny(**options: Any) -> SwinConfig:
    sizes = {"dim": 16, "depths": (2, 2), "heads": (2, 4), "windows": (4, 4), "image_size": 32, "num_classes": 5}
    return SwinConfig(**{**sizes, "drop_path": 0.0, **options})


def tiny_timm(version: int, **options: Any) -> torch.nn.Module:
    sizes = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 32, "num_classes": 5}
    if version == 2:
        sizes["pretrained_window_sizes"] = (0, 0)
    return randomise((TimmV2 if version == 2 else TimmV1)(**{**sizes, "drop_path_rate": 0.0, **options}).eval(), 0)


def tiny_torchvision(version: int, **options: Any) -> torch.nn.Module:
    sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    parts = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if version == 2 else {}
    model = SwinTransformer(**{**sizes, "num_classes": 5, "stochastic_depth_prob": 0.0, **parts, **options})
    return randomise(model.eval(), 0)


def images(height: int, width: int, channels: int = 3, number: int = 4) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(number, height, width, channels)).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", TIMM_OPTIONS)
def test_outputs_and_gradients_are_those_of_timm(case, version):
    ours, theirs, size = TIMM_OPTIONS[case]
    config = tiny(version=version, **ours)
    assert_same_results((FAMILY, config), tiny_timm(version, **theirs), images(*size, config.in_channels), TIMM)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", TORCHVISION_OPTIONS)
def test_outputs_and_gradients_are_those_of_torchvision(case, version):
    ours, theirs, size = TORCHVISION_OPTIONS[case]
    config = tiny(version=version, cut_windows=False, pad_first=True, **ours)
    assert_same_results((FAMILY, config), tiny_torchvision(version, **theirs), images(*size), TORCHVISION)


# Our options, timm's for the same, and whether a model without them notices by its outputs or already by its weights.
FORGOTTEN: dict[str, tuple[int, dict[str, Any], dict[str, Any], Any]] = {
    "heads": (1, {"heads": (4, 2)}, {"num_heads": (4, 2)}, CheckpointError),
    "windows of V1": (1, {"windows": (4, 2)}, {"window_size": ((4, 4), (2, 2))}, CheckpointError),
    "windows of V2": (2, {"windows": (4, 2)}, {"window_size": ((4, 4), (2, 2))}, AssertionError),
    "pretrained_windows": (2, {"pretrained_windows": (6, 0)}, {"pretrained_window_sizes": (6, 0)}, AssertionError),
    "patch_size": (1, {"patch_size": 2}, {"patch_size": 2}, CheckpointError),
    "in_channels": (1, {"in_channels": 1}, {"in_chans": 1}, CheckpointError),
    "mlp_ratio": (1, {"mlp_ratio": 2.6}, {"mlp_ratio": 2.6}, CheckpointError),
    "depths": (2, {"depths": (2, 3)}, {"depths": (2, 3)}, CheckpointError),
    "qkv_bias of V1": (1, {"qkv_bias": False}, {"qkv_bias": False}, CheckpointError),
    "qkv_bias of V2": (2, {"qkv_bias": False}, {"qkv_bias": False}, CheckpointError),
    "num_classes": (1, {"num_classes": 0}, {"num_classes": 0}, CheckpointError),
    "image_size": (2, {"image_size": 16}, {"img_size": 16}, AssertionError),
}


@eqx.filter_jit
def outputs(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def frozen(config: SwinConfig, upstream: torch.nn.Module) -> Any:
    return freeze(*from_torch((FAMILY, config), upstream))


@pytest.mark.parametrize("option", FORGOTTEN)
def test_a_forgotten_option_is_noticed(option):
    version, ours, theirs, error = FORGOTTEN[option]
    config = tiny(version=version, **ours)
    upstream = tiny_timm(version, **theirs)
    x = images(config.image_size, config.image_size, config.in_channels, 1)
    if error is AssertionError:
        assert_close(outputs(frozen(config, upstream), x), upstream(channels_first(x)), 1e-4)
    with pytest.raises(error):
        assert_close(outputs(frozen(tiny(version=version), upstream), x), upstream(channels_first(x)), 1e-3)


@pytest.mark.parametrize(("forgotten", "size"), [({"pad_first": False}, (40, 32)), ({"cut_windows": True}, (32, 64))])
def test_a_forgotten_way_to_treat_windows_is_noticed(forgotten, size):
    config = tiny(cut_windows=False, pad_first=True)
    upstream, x = tiny_torchvision(1), images(*size, number=1)
    theirs = upstream(channels_first(x))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(outputs(frozen(replace(config, **forgotten), upstream), x), theirs, 1e-3)


def test_scores_of_v2_are_at_most_a_hundred_times_the_cosine():
    upstream = tiny_timm(2)
    for stage in upstream.layers:
        for block in stage.blocks:
            torch.nn.init.uniform_(block.attn.logit_scale, 4, 6)
    x = images(32, 32, number=1)
    assert_close(outputs(frozen(tiny(version=2), upstream), x), upstream(channels_first(x)), 1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about timm
@pytest.mark.parametrize(("old", "new"), [(32, 20), (20, 32), (24, 40)])
def test_tables_for_another_image_size_are_timms(old, new, tmp_path):
    """Windows are cut anew, and V1's tables resampled."""
    sizes = {"windows": (12, 12), "patch_size": 2}
    config = tiny(**sizes, image_size=old)
    before = tiny_timm(1, window_size=12, patch_size=2, img_size=old)
    after = tiny_timm(1, window_size=12, patch_size=2, img_size=new)
    after.load_state_dict(checkpoint_filter_fn(before.state_dict(), after))
    model, _ = from_torch((FAMILY, config), before)
    assert model.stages[1].blocks.block.attention.bias.table.shape != (2, 23**2, 4)
    eqzoo.save(tmp_path / "model.safetensors", model)
    resized = eqzoo.load(tmp_path / "model.safetensors", image_size=new)
    assert resized.config == replace(config, image_size=new)
    expected = after.state_dict()
    for name, ours in unfill(resized, TIMM).items():
        assert_close(ours, expected[name], 1e-5)
    x = images(new, new, number=1)
    assert_close(outputs(resized, x), after(channels_first(x)), 1e-4)


def test_v2_needs_no_table_for_another_image_size(tmp_path):
    model, _ = from_torch((FAMILY, tiny(version=2, windows=(8, 8))), tiny_timm(2, window_size=8))
    eqzoo.save(tmp_path / "model.safetensors", model)
    resized = eqzoo.load(tmp_path / "model.safetensors", image_size=24)
    upstream = tiny_timm(2, window_size=8, img_size=24)
    x = images(24, 24, number=1)
    assert_close(outputs(resized, x), upstream(channels_first(x)), 1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_the_authors_own_files_load(version):
    """Their mergers end a stage, as timm's begin one; indices, offsets and masks are stored too."""
    upstream = tiny_timm(version)
    tensors = {
        name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head."): _stored(tensor.numpy())
        for name, tensor in upstream.state_dict().items()
    }
    for buffer in ("attn_mask", "attn.relative_position_index", "attn.relative_coords_table"):
        tensors[f"layers.0.blocks.1.{buffer}"] = _stored(np.zeros((2, 2)))
    config = tiny(version=version)
    model, _ = filled(tensors, _skeleton(partial(Swin, config)), {"microsoft": MICROSOFT})
    assert eqx.tree_equal(model, from_torch((FAMILY, config), upstream)[0])


def without_key_bias(upstream: torch.nn.Module) -> torch.nn.Module:
    """V2 as torchvision makes and keeps it: the biases of its keys are zero."""
    for module in upstream.modules():
        if hasattr(module, "logit_scale"):
            module.qkv.bias.data.chunk(3)[1].zero_()
    return upstream


@pytest.mark.parametrize("version", [1, 2])
def test_what_torchvision_stores_comes_back(version):
    """Number by number, with the indices and offsets that it stores."""
    config = tiny(version=version, cut_windows=False, pad_first=True, windows=(4, 4))
    upstream = without_key_bias(tiny_torchvision(version))
    model, _ = from_torch((FAMILY, config), upstream)
    back = {**unfill(model, TORCHVISION), **FAMILY.upstreams["torchvision"].buffers(config)}
    state_dict = upstream.state_dict()
    assert back.keys() == state_dict.keys()
    for name, ours in back.items():
        assert np.array_equal(ours, state_dict[name].numpy()), name


def test_torchvision_loads_what_is_exported(tmp_path):
    model = eqx.filter_jit(Swin)(replace(VARIANTS["swin_v2_t"], num_classes=3, image_size=96), key=jax.random.key(0))
    eqzoo.export(tmp_path / "model.pth", model, format="torchvision")
    upstream = torchvision.models.swin_v2_t(num_classes=3).eval()
    upstream.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True), strict=True)
    x = images(70, 60, number=1)
    assert_close(outputs(eqx.nn.inference_mode(model), x), upstream(channels_first(x)), 1e-4)


@pytest.mark.parametrize("name", ["swin_s3_tiny_224", "swinv2_base_window12to16_192to256"])
def test_timm_loads_what_is_exported(name, tmp_path):
    config = replace(VARIANTS[name], dim=32, heads=(1, 2, 4, 8), depths=(1, 1, 1, 1), num_classes=3)
    model = eqx.filter_jit(Swin)(config, key=jax.random.key(0))
    eqzoo.export(tmp_path / "ours", model, format="timm")
    back = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True)
    assert config_of(back) == config
    for tensor_name, ours in unfill(model, TIMM).items():
        assert np.array_equal(ours, back.state_dict()[tensor_name])
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours", trainable=True)[0], model)


@pytest.mark.parametrize("tag", ["swin_base_patch4_window12_384.ms_in22k", "swinv2_large_window12_192.ms_in22k"])
def test_published_weights_are_described_by_their_config(tag):
    stated: Any = timm.get_pretrained_cfg(tag)
    saved = {"architecture": stated.architecture, "pretrained_cfg": {**stated.to_dict(), "hf_hub_id": None}}
    name, family, config = from_config_json(saved)
    assert (name, family) == (stated.architecture, FAMILY)
    assert config == replace(VARIANTS[name], num_classes=21841)


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"window_size": 5}, (5, 5, 5, 5)),
        ({"window_size": (6, 6)}, (6,) * 4),
        ({"window_size": [7, [8, 8], 7, 7]}, (7, 8, 7, 7)),
    ],
)
def test_windows_are_stated_in_one_number_in_two_or_by_stage(options, windows):
    assert FAMILY.upstreams["timm"].options.read(options) == {"windows": windows}


@pytest.mark.parametrize("version", [1, 2])
def test_initial_weights_are_spread_as_in_timm(version):
    config = tiny(version=version, dim=96, heads=(3, 6), depths=(1, 1), num_classes=100)
    upstream = tiny_timm(version, embed_dim=96, num_heads=(3, 6), depths=(1, 1), num_classes=100)
    upstream = type(upstream)(
        embed_dim=96, num_heads=(3, 6), depths=(1, 1), num_classes=100, window_size=4, img_size=32
    )
    ours = unfill(eqx.filter_jit(Swin)(config, key=jax.random.key(0)), TIMM)
    for name, theirs in upstream.state_dict().items():
        if theirs.std() == 0:
            np.testing.assert_allclose(ours[name], theirs, rtol=1e-6, err_msg=name)
        else:
            spread = 5 / np.sqrt(theirs.numel())  # five deviations of what two samples of this size differ by
            assert abs(ours[name].std() / theirs.std() - 1) < spread, name


@pytest.mark.parametrize("version", [1, 2])
def test_every_matrix_has_a_sharding_rule(version):
    """In both versions, of which the contract battery has one."""
    replicated = r".*\.bias\.(table|fc\d\.weight)"
    model, _ = _skeleton(partial(Swin, tiny(version=version)))
    for path, leaf in leaves_with_paths(model):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.ndim - path.count("[*]") >= 2:
            assert any(matches(pattern, path) for pattern, _ in FAMILY.sharding) != matches(replicated, path), path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": (2, 4, 8)}, r"heads=\(2, 4, 8\) and depths=\(2, 2\) differ in length"),
        ({"heads": (3, 4)}, "holds 3, but its stage has 16 channels"),
        ({"windows": (7, 0)}, "holds a window without tokens"),
        ({"pretrained_windows": (7, 7)}, "leave them out or use version=2"),
        ({"image_size": 3}, "image_size=3 is below patch_size=4"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)
