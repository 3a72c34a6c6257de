"""MLP-Mixer, gMixer, ResMLP and gMLP are timm's: every variant's names, shapes and options; outputs and gradients of
every option."""

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
from timm.layers import GatedMlp, GluMlp
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock, SpatialGatingBlock

import eqzoo
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._mixer_upstream import TIMM, TIMM_OPTIONS
from eqzoo.models.vision.mixer import FAMILY, VARIANTS, Mixer, MixerConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    randomise,
)

BLOCKS = {"MixerBlock": "mixer", "ResBlock": "resmlp", "SpatialGatingBlock": "gmlp"}

# The modules that the mathematics of this family is made of. Anything else in an upstream model needs a look.
KNOWN = {
    *("MlpMixer", "PatchEmbed", *BLOCKS, "Mlp", "GluMlp", "GatedMlp", "SpatialGatingUnit", "Affine", "LayerNorm"),
    *("Conv2d", "Linear", "GELU", "SiLU", "Dropout", "Identity", "Sequential"),
}


def kind(module: torch.nn.Module) -> str:
    return type(module).__name__


def config_of(model: MlpMixer) -> MixerConfig:
    """The config of a timm model, read off the model itself."""
    block, dim = model.blocks[0], model.embed_dim
    ratio = block.mlp_channels.fc1.out_features / dim
    mixes = kind(block) == "MixerBlock"
    return MixerConfig(
        dim=dim,
        depth=len(model.blocks),
        block=BLOCKS[kind(block)],
        patch_size=model.stem.patch_size[0],
        image_size=model.stem.img_size[0],
        in_channels=model.in_chans,
        mlp_ratio=(block.mlp_tokens.fc1.out_features / dim, ratio) if mixes else ratio,
        gated=kind(block.mlp_channels) == "GluMlp",
        activation={"GELU": "gelu", "SiLU": "silu"}[kind(block.mlp_channels.act)],
        layer_scale=VARIANTS[model.default_cfg["architecture"]].layer_scale,  # of which the meta device knows nothing
        stem_norm=kind(model.stem.norm) != "Identity",
        num_classes=model.num_classes,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_timm_variant_has_the_same_options_names_and_shapes(name):
    with torch.device("meta"):
        upstream = timm.create_model(name)
    assert {kind(module) for module in upstream.modules()} <= KNOWN
    assert config_of(upstream) == VARIANTS[name]
    for path, module in upstream.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert module.eps == (1e-5 if path.endswith("gate.norm") else 1e-6), path
        if kind(module) == "GluMlp":
            assert module.gate_last
    assert (kind(upstream.norm) == "Affine") == (VARIANTS[name].block == "resmlp")
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("resmlp")])
def test_layer_scales_start_as_in_timm(name):
    scale = timm.create_model(name, img_size=16).blocks[0].ls1
    assert torch.equal(scale, torch.full_like(scale, VARIANTS[name].layer_scale))


# Every kind and option, in few models: ours, timm's for the same in JSON, and those that JSON can't say.
GMIXER = {"mlp_layer": GluMlp, "act_layer": torch.nn.SiLU}
RESMLP = {"block_layer": ResBlock, "norm_layer": Affine}
GMLP = {"block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mixer": ({}, {}, {}),
    "mixer with stem norm, one ratio, one channel": (
        {"stem_norm": True, "mlp_ratio": 1.5, "in_channels": 1, "patch_size": 4, "num_classes": 3},
        {"stem_norm": True, "mlp_ratio": 1.5, "in_chans": 1, "patch_size": 4, "num_classes": 3},
        {},
    ),
    "gmixer": (
        {"mlp_ratio": (1.0, 3.0), "gated": True, "activation": "silu", "stem_norm": True, "num_classes": 0},
        {"mlp_ratio": (1.0, 3.0), "stem_norm": True, "num_classes": 0},
        GMIXER,
    ),
    "resmlp": (
        {"block": "resmlp", "mlp_ratio": 2.5, "layer_scale": 1e-4, "stem_norm": True},
        {"mlp_ratio": 2.5, "stem_norm": True},
        RESMLP,
    ),
    "gmlp": ({"block": "gmlp", "mlp_ratio": 3.0, "image_size": 40}, {"mlp_ratio": 3, "img_size": [40, 40]}, GMLP),
}


def tiny(**options: Any) -> MixerConfig:
    sizes = {"dim": 24, "depth": 2, "patch_size": 8, "image_size": 32, "num_classes": 5}
    return MixerConfig(**{**sizes, **options})


def tiny_timm(**options: Any) -> torch.nn.Module:
    sizes = {"embed_dim": 24, "num_blocks": 2, "patch_size": 8, "img_size": 32, "num_classes": 5}
    return randomise(MlpMixer(**{**sizes, **options}).eval(), 0)


def images(config: MixerConfig) -> np.ndarray:
    shape = (4, config.image_size, config.image_size, config.in_channels)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_and_gradients_are_those_of_timm(option):
    ours, said, unsaid = OPTIONS[option]
    config, upstream = tiny(**ours), tiny_timm(**said, **unsaid)
    built = replace(tiny(**{**ours, "mlp_ratio": config.mlp_ratio}), **TIMM_OPTIONS.read(said))
    assert built == config
    assert_same_results((FAMILY, config), upstream, images(config), TIMM)
    exported = unfill(from_torch((FAMILY, config), upstream)[0], TIMM)
    original = {name: tensor.numpy() for name, tensor in upstream.state_dict().items()}
    assert exported.keys() == original.keys()
    assert all(np.array_equal(exported[name], original[name]) for name in original)


# Our options, timm's for the same, and whether a model without them notices by its outputs or already by its weights.
FORGOTTEN: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception]]] = {
    "activation": ({"activation": "silu"}, {"act_layer": torch.nn.SiLU}, AssertionError),
    "gated": ({"gated": True}, {"mlp_layer": GluMlp}, CheckpointError),
    "resmlp": ({"block": "resmlp", "mlp_ratio": 4.0, "layer_scale": 1e-4}, {**RESMLP, "mlp_ratio": 4}, CheckpointError),
    "gmlp": ({"block": "gmlp", "mlp_ratio": 4.0}, {**GMLP, "mlp_ratio": 4}, CheckpointError),
    "mlp_ratio": ({"mlp_ratio": (0.5, 3.0)}, {"mlp_ratio": (0.5, 3.0)}, CheckpointError),
    "token ratio": ({"mlp_ratio": (1.0, 4.0)}, {"mlp_ratio": (1.0, 4.0)}, CheckpointError),
    "stem_norm": ({"stem_norm": True}, {"stem_norm": True}, CheckpointError),
    "depth": ({"depth": 3}, {"num_blocks": 3}, CheckpointError),
    "patch_size": ({"patch_size": 4}, {"patch_size": 4}, CheckpointError),
    "image_size": ({"image_size": 40}, {"img_size": 40}, CheckpointError),
    "in_channels": ({"in_channels": 1}, {"in_chans": 1}, CheckpointError),
    "num_classes": ({"num_classes": 0}, {"num_classes": 0}, CheckpointError),
}


@pytest.mark.parametrize("option", FORGOTTEN)
def test_a_forgotten_option_is_noticed(option):
    ours, theirs, error = FORGOTTEN[option]
    upstream, x = tiny_timm(**theirs), images(tiny(**ours))
    ours, _ = from_torch((FAMILY, tiny(**ours)), upstream)
    with pytest.raises(error, match="relative error" if error is AssertionError else "does not fit"):
        assert_close(_outputs(from_torch((FAMILY, tiny()), upstream)[0], x), np.asarray(_outputs(ours, x)), 1e-4)


def _outputs(model: Mixer, x: np.ndarray) -> jax.Array:
    return eqx.filter_jit(_mapped)(model, jnp.asarray(x))


def _mapped(model: Mixer, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


@pytest.mark.parametrize("option", ["mixer", "gmixer", "resmlp", "gmlp"])
def test_initial_weights_are_spread_as_in_timm(option):
    ours, said, unsaid = OPTIONS[option]
    upstream = MlpMixer(
        **{"embed_dim": 48, "num_blocks": 1, "patch_size": 8, "img_size": 40, "num_classes": 5, **said, **unsaid}
    )
    config = tiny(**{**ours, "dim": 48, "depth": 1, "image_size": 40})
    exported = unfill(eqx.filter_jit(Mixer)(config, key=jax.random.key(0)), TIMM)
    for name, theirs in upstream.state_dict().items():
        if name.endswith("bias"):  # near 0, but for gates
            np.testing.assert_allclose(exported[name], theirs, atol=1e-5, err_msg=name)
        elif theirs.min() == theirs.max():
            np.testing.assert_array_equal(exported[name], theirs, err_msg=name)
        else:
            halves = zip(np.array_split(exported[name], 2), np.array_split(theirs.numpy(), 2), strict=True)
            for half, other in halves:  # one of which may be a gate
                assert abs(half.std() / other.std() - 1) < 5 / np.sqrt(other.size), name


@pytest.mark.parametrize("option", ["mlp_dropout", "dropout", "drop_path"])
@pytest.mark.parametrize("block", ["mixer", "gmixer", "resmlp", "gmlp"])
def test_training_needs_a_key_and_depends_on_it(block, option):
    ours, said, unsaid = OPTIONS[block]
    config = replace(tiny(**{**ours, "num_classes": 5}), **{option: 0.5})
    model, _ = from_torch((FAMILY, config), tiny_timm(**{**said, **unsaid, "num_classes": 5}))
    x = jnp.asarray(images(config)[0])
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 0, 4)])
    first, again, other = eqx.filter_jit(jax.vmap(lambda key: model(x, key=key)))(keys)
    assert jnp.array_equal(first, again)
    assert not jnp.allclose(first, other)
    with pytest.raises(ValueError, match="got no key in training mode"):
        eqx.filter_eval_shape(model, x)


def test_every_block_drops_its_branches_as_often_as_in_timm():
    """At one rate, not at one that grows with depth: also the first block's two branches come and go."""
    config = tiny(depth=1, drop_path=0.5)
    upstream = MlpMixer(embed_dim=24, num_blocks=3, patch_size=8, img_size=32, drop_path_rate=0.5)
    assert [block.drop_path.drop_prob for block in upstream.blocks] == [0.5, 0.5, 0.5]
    model, _ = from_torch((FAMILY, config), tiny_timm(num_blocks=1))
    x, keys = jnp.asarray(images(config)[0]), jax.random.split(jax.random.key(0), 32)
    ys = eqx.filter_jit(jax.vmap(lambda key: model(x, key=key)))(keys)
    assert len(np.unique(np.round(np.asarray(ys), 3), axis=0)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 33}, "image_size=33 is not a multiple of patch_size=8; the nearest below is 32"),
        ({"block": "gmlp"}, r"mlp_ratio=\(0.5, 4.0\) is a pair, but block='gmlp' takes one number"),
        ({"block": "gmlp", "mlp_ratio": 2.0, "gated": True}, "gated=True is for block='mixer', not 'gmlp'"),
        ({"layer_scale": 1e-4}, "layer_scale=0.0001 doesn't go with block='mixer'"),
        ({"block": "resmlp", "mlp_ratio": 4.0}, "layer_scale=None doesn't go with block='resmlp'"),
        ({"gated": True, "mlp_ratio": (0.625, 4.0)}, r"perceptrons of widths \(15, 96\), which a gate can't halve"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_another_image_size_is_refused():
    model = eqx.filter_eval_shape(partial(Mixer, tiny()), key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"Mixer: x is an array of shape .* expected a float array of shape \(32, 32"):
        model(jnp.zeros((48, 48, 3)))
    with pytest.raises(ValueError, match=r"img_size=\[32, 40\] is not square"):
        TIMM_OPTIONS.read({"img_size": [32, 40]})


def test_a_checkpoint_for_another_image_size_can_not_be_adapted(tmp_path):
    upstream = tiny_timm()
    eqzoo.save(tmp_path / "model.safetensors", *from_torch((FAMILY, tiny()), upstream))
    with pytest.raises(ValueError, match="image_size of Mixer is 32 and can't be changed on the way"):
        eqzoo.load(tmp_path / "model.safetensors", image_size=40)
