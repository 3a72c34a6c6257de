"""Eva is timm's: every variant's names, shapes and options; outputs and gradients of every option."""

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
import transformers
from timm.models.eva import Eva as TimmEva

import eqzoo
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.vision.eva import FAMILY, VARIANTS, EvaConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    randomise,
)

# The modules that the mathematics of this family is made of. Anything else in an upstream model needs a look.
MLPS = {"Mlp": "mlp", "SwiGLU": "swiglu", "GluMlp": "swiglu"}
ROTARY = {
    "NoneType": "none",
    "RotaryEmbeddingCat": "grid",
    "RotaryEmbeddingMixed": "mixed",
    "RotaryEmbeddingDinoV3": "centred",
}
KNOWN = {
    *("Eva", "EvaBlock", "EvaBlockPostNorm", "EvaAttention", "AttentionRope", "AttentionPoolLatent", "PatchEmbed"),
    *("LayerNorm", "Linear", "Conv2d", "Identity", "Dropout", "ModuleList", "GELU", "SiLU", *MLPS, *ROTARY),
}


def is_there(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.Identity)


def config_of(model: TimmEva) -> dict[str, Any]:
    """The config of a timm model, read off the model itself, but for the width of its MLPs."""
    block, rope = model.blocks[0], model.rope
    rotary = ROTARY[type(rope).__name__]
    if rotary != "none":
        assert rope.shift_coords is rope.jitter_coords is rope.rescale_coords is None
        assert block.attn.rotate_half == (rotary == "centred")
    reference = getattr(rope, "ref_feat_shape", None)
    return {
        "dim": model.embed_dim,
        "depth": len(model.blocks),
        "heads": block.attn.num_heads,
        "patch_size": model.patch_embed.patch_size[0],
        "image_size": model.patch_embed.img_size[0],
        "in_channels": model.in_chans,
        "mlp": MLPS[type(block.mlp).__name__],
        "class_token": model.cls_token is not None,
        "registers": 0 if model.reg_token is None else model.reg_token.shape[1],
        "learned_positions": model.pos_embed is not None,
        "prefix_positions": model.pos_embed is None or not model.no_embed_class,
        "rotary": rotary,
        "rotary_base": 10000.0 if rotary == "none" else float(rope.temperature),
        "rotary_grid": None if reference is None else reference[0],
        "rotary_offset": getattr(rope, "grid_offset", 0.0),
        "rotary_columns_first": getattr(rope, "grid_indexing", "ij") == "xy",
        "pool": model.global_pool,
        "pool_heads": None if model.attn_pool is None else model.attn_pool.num_heads,
        "norm_eps": block.norm1.eps,
        "post_norm": type(block).__name__ == "EvaBlockPostNorm",
        "pre_norm": is_there(model.norm_pre),
        "attention_norm": is_there(block.attn.norm),
        "mlp_norm": is_there(block.mlp.norm),
        "final_norm": is_there(model.norm),
        "fc_norm": is_there(model.fc_norm),
        "layer_scale": getattr(block, "init_values", None),
        "qkv_bias": any(name.endswith(("q_bias", "q_proj.bias", "qkv.bias")) for name, _ in block.named_parameters()),
        "key_bias": getattr(block.attn.qkv, "bias", None) is not None,
        "num_classes": model.num_classes,
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_same_options_names_and_shapes(name):
    with torch.device("meta"):
        upstream = timm.create_model(name)
    ours, theirs = VARIANTS[name], config_of(upstream)
    assert replace(ours, **theirs) == ours
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    norms = [module for module in upstream.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {ours.norm_eps}
    assert_names_and_shapes((FAMILY, ours), upstream.state_dict())


TOKEN = {"pool": "token", "final_norm": True, "fc_norm": False}
NAVER = {"attn_type": "rope", "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "global_pool": "token"}

# Every option, in few models: how timm writes it down, ours, and timm's for the same.
OPTIONS = {
    "plain": ("timm", {"in_channels": 1, "mlp_ratio": 2.6}, {"in_chans": 1, "mlp_ratio": 2.6}),
    "packed gates, rescaled grid": (
        "timm",
        {"mlp": "swiglu", "mlp_ratio": 2.5, "rotary": "grid", "rotary_grid": 3, "norm_eps": 0.1},
        {"swiglu_mlp": True, "mlp_ratio": 2.5, "use_rot_pos_emb": True, "ref_feat_shape": (3, 3)}
        | {"norm_layer": partial(timm.layers.LayerNorm, eps=0.1)},
    ),
    "inner norms": (
        "timm_separate",
        {"mlp": "swiglu", "mlp_norm": True, "attention_norm": True, "rotary": "grid", **TOKEN},
        {"swiglu_mlp": True, "scale_mlp": True, "scale_attn_inner": True, "qkv_fused": False}
        | {"use_rot_pos_emb": True, "global_pool": "token"},
    ),
    "normalised last": ("timm", {"post_norm": True, **TOKEN}, {"use_post_norm": True, "global_pool": "token"}),
    "attention pool": (
        "timm",
        {"rotary": "grid", "rotary_columns_first": True, "rotary_offset": 1.0, "rotary_grid": 3, "pre_norm": True}
        | {"pool": "map", "pool_heads": 2, "final_norm": True, "fc_norm": False, "key_bias": True},
        {"attn_type": "rope", "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "rope_grid_offset": 1.0}
        | {"ref_feat_shape": (3, 3), "global_pool": "map", "attn_pool_num_heads": 2}
        | {"use_pre_transformer_norm": True},
    ),
    "no norm at the end": (
        "timm",
        {"fc_norm": False, "class_token": False, "layer_scale": 0.1, "num_classes": 0},
        {"use_fc_norm": False, "use_post_transformer_norm": False, "class_token": False, "init_values": 0.1}
        | {"num_classes": 0},
    ),
    "mixed frequencies": (
        "timm",
        {"rotary": "mixed", "rotary_columns_first": True, "learned_positions": False, "key_bias": True, **TOKEN},
        {**NAVER, "rope_type": "mixed", "use_abs_pos_emb": False},
    ),
    "positions of patches only": (
        "timm",
        {"rotary": "grid", "rotary_base": 100.0, "rotary_columns_first": True, "prefix_positions": False}
        | {"key_bias": True, **TOKEN},
        {**NAVER, "rope_temperature": 100.0, "no_embed_class": True},
    ),
    "centred": (
        "timm_gated",
        {"rotary": "centred", "rotary_base": 100.0, "learned_positions": False, "registers": 2, "layer_scale": 1e-5}
        | {"final_norm": True, "fc_norm": False, "qkv_bias": False, "mlp": "swiglu", "mlp_multiple": 64},
        {"rope_type": "dinov3", "rope_temperature": 100, "use_rot_pos_emb": True, "use_abs_pos_emb": False}
        | {"rope_rotate_half": True, "num_reg_tokens": 2, "init_values": 1e-5, "use_fc_norm": False, "qkv_bias": False}
        | {"swiglu_mlp": True, "swiglu_align_to": 64, "dynamic_img_size": True},
    ),
}


def tiny(**options: Any) -> EvaConfig:
    sizes = {"dim": 24, "depth": 2, "heads": 3, "patch_size": 8, "image_size": 32, "num_classes": 5}
    return EvaConfig(**{**sizes, **options})


def tiny_timm(**options: Any) -> TimmEva:
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32, "num_classes": 5}
    return randomise(TimmEva(**{**sizes, **options}).eval(), 0)


def images(config: EvaConfig, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, height, width, config.in_channels)).astype(np.float32)


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_are_those_of_timm(case):
    naming, ours, theirs = OPTIONS[case]
    config = tiny(**ours)
    size = (24, 40) if theirs.get("dynamic_img_size") else (32, 32)
    assert_same_results((FAMILY, config), tiny_timm(**theirs), images(config, *size), FAMILY.rules[naming])


# Options that change numbers only, and a value that is not the model's.
FORGOTTEN = (
    ("packed gates, rescaled grid", {"rotary_grid": None}),
    ("packed gates, rescaled grid", {"rotary": "centred"}),
    ("packed gates, rescaled grid", {"rotary_columns_first": True}),
    ("packed gates, rescaled grid", {"rotary_base": 100.0}),
    ("packed gates, rescaled grid", {"norm_eps": 1e-6}),
    ("attention pool", {"rotary_offset": 0.0}),
    ("attention pool", {"pool_heads": None}),
    ("normalised last", {"post_norm": False}),
    ("normalised last", {"pool": "avg"}),
    ("mixed frequencies", {"rotary_columns_first": False}),
    ("plain", {"in_channels": 3}),
    ("inner norms", {"mlp_norm": False}),
    ("inner norms", {"attention_norm": False}),
    ("centred", {"mlp_multiple": 1}),
    ("centred", {"mlp": "mlp"}),
)


def outputs(config: EvaConfig, upstream: TimmEva, x: np.ndarray) -> jax.Array:
    model = eqzoo.freeze(*from_torch((FAMILY, config), upstream))
    return eqx.filter_jit(eqx.filter_vmap(model))(jnp.asarray(x))


@pytest.mark.parametrize(("case", "change"), FORGOTTEN)
def test_a_forgotten_option_is_noticed(case, change):
    _, ours, theirs = OPTIONS[case]
    upstream = tiny_timm(**theirs)
    config = tiny(**{**ours, **change})
    x = images(tiny(**ours))
    with pytest.raises((AssertionError, CheckpointError)):
        assert_close(outputs(config, upstream, x), upstream(torch.tensor(x).permute(0, 3, 1, 2)), 1e-3)


DINOV3 = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}


@pytest.mark.parametrize(
    "options",
    [
        {"num_register_tokens": 2, "intermediate_size": 41},
        {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu", "query_bias": False}
        | {"value_bias": False, "rope_theta": 50.0, "layer_norm_eps": 0.1},
    ],
    ids=["plain", "gates"],
)
def test_transformers_dinov3_is_read_and_written(options, tmp_path, saved):
    upstream = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**DINOV3, **options)).eval()
    upstream = randomise(upstream, 0)
    model = eqzoo.load(saved(upstream))
    x = images(model.config, 24, 40)
    with torch.no_grad():
        theirs = upstream(torch.tensor(x).permute(0, 3, 1, 2)).pooler_output
    assert_close(eqx.filter_jit(eqx.filter_vmap(model))(jnp.asarray(x)), theirs, 1e-4)
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = transformers.DINOv3ViTModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    for name, tensor in back.state_dict().items():
        assert name.endswith("mask_token") or torch.equal(tensor, upstream.state_dict()[name]), name
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_7b_patch16_dinov3", "eva02_base_patch16_clip_224"])
def test_timm_reads_what_is_exported(name, tmp_path):
    config = replace(VARIANTS[name], dim=24, depth=2, heads=3, patch_size=8, image_size=32)
    pair = eqx.nn.make_with_state(partial(eqzoo.Eva, config))(key=jax.random.key(0))
    eqzoo.export(tmp_path / "out", *pair, format="timm")
    upstream = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = images(config)
    with torch.no_grad():
        theirs = upstream(torch.tensor(x).permute(0, 3, 1, 2))
    assert_close(eqx.filter_jit(eqx.filter_vmap(eqzoo.freeze(*pair)))(jnp.asarray(x)), theirs, 1e-4)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "out", trainable=True), pair)


def test_an_image_of_another_size_than_the_learned_positions_is_refused():
    model = eqx.filter_jit(eqzoo.Eva)(tiny(), key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"Eva: x is an array of shape \(40, 40, 3\) .*, expected .* \(32, 32, 3\)"):
        model(jnp.zeros((40, 40, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 33}, "image_size=33 is not a multiple of patch_size=8; the nearest below is 32"),
        ({"heads": 5}, "dim=24 is not a multiple of heads=5"),
        ({"heads": 4, "rotary": "grid"}, "choose a multiple of 4"),
        ({"class_token": False, "pool": "token"}, "pool='token' reads the class token"),
        ({"post_norm": True, "layer_scale": 0.1}, "post_norm=True has no layer scales"),
        ({"layer_scale": 0.0}, "layer_scale=0 would silence every block"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)
