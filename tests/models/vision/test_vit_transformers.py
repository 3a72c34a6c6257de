"""ViT is transformers' ViT, DeiT and DINOv2: published names and shapes; outputs and gradients of every option; folders
that transformers wrote, and folders that it reads."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jaxtyping import Array
from transformers.core_model_loading import revert_weight_conversion

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.vision._vit_upstream import (
    TRANSFORMERS_DEIT,
    TRANSFORMERS_DINOV2,
    TRANSFORMERS_SIGLIP,
    TRANSFORMERS_VIT,
)
from eqzoo.models.vision.vit import FAMILY, VARIANTS, ViT, ViTConfig
from tests.parity import assert_close, assert_names_and_shapes, assert_same_gradients, randomise

CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "vit": (transformers.ViTConfig, transformers.ViTForImageClassification, TRANSFORMERS_VIT),
    "deit": (transformers.DeiTConfig, transformers.DeiTForImageClassificationWithTeacher, TRANSFORMERS_DEIT),
    "dinov2": (transformers.Dinov2Config, transformers.Dinov2Model, TRANSFORMERS_DINOV2),
    "dinov2_with_registers": (
        transformers.Dinov2WithRegistersConfig,
        transformers.Dinov2WithRegistersModel,
        TRANSFORMERS_DINOV2,
    ),
    "siglip_vision_model": (transformers.SiglipVisionConfig, transformers.SiglipVisionModel, TRANSFORMERS_SIGLIP),
}

# What tells the published configs apart: the class, its options, and our variant (of transformers' epsilon).
PUBLISHED = {
    "google/vit-base-patch16-224": ("vit", {}, 1000, "vit_base_patch16_224", {}),
    "google/vit-large-patch32-384": (
        "vit",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        | {"image_size": 384, "patch_size": 32},
        1000,
        "vit_large_patch32_384",
        {},
    ),
    "facebook/deit-small-patch16-224": (
        "vit",
        {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        1000,
        "deit_small_patch16_224",
        {},
    ),
    "facebook/deit-base-distilled-patch16-224": ("deit", {}, 1000, "deit_base_distilled_patch16_224", {}),
    "facebook/dinov2-base": ("dinov2", {"image_size": 518}, 0, "vit_base_patch14_dinov2", {"layer_scale": 1.0}),
    "facebook/dinov2-with-registers-base": (
        "dinov2_with_registers",
        {"image_size": 518, "patch_size": 14},
        0,
        "vit_base_patch14_reg4_dinov2",
        {"layer_scale": 1.0, "prefix_positions": True, "register_positions": False},
    ),
    "facebook/dinov2-giant": (
        "dinov2",
        {"image_size": 518, "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24}
        | {"use_swiglu_ffn": True},
        0,
        "vit_giant_patch14_dinov2",
        {"layer_scale": 1.0, "mlp_ratio": 8192 / 1536},
    ),
    "the image tower of google/siglip-so400m-patch14-384": (
        "siglip_vision_model",
        {"image_size": 384, "patch_size": 14, "hidden_size": 1152, "intermediate_size": 4304}
        | {"num_hidden_layers": 27, "num_attention_heads": 16},
        0,
        "vit_so400m_patch14_siglip_384",
        {"activation": "gelu_tanh", "mlp_ratio": 4304 / 1152},
    ),
}

TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}

# Of each class every option, in few models.
OPTIONS = {
    "vit": ("vit", {"intermediate_size": 41, "num_labels": 5}),
    "vit options": (
        "vit",
        {"num_attention_heads": 2, "num_channels": 1, "num_hidden_layers": 1, "layer_norm_eps": 0.1, "num_labels": 3}
        | {"hidden_act": "quick_gelu", "qkv_bias": False, "image_size": [24, 24], "patch_size": (4, 4)},
    ),
    "deit": ("deit", {"intermediate_size": 62, "hidden_act": "gelu_new", "num_labels": 5}),
    "dinov2": ("dinov2", {"mlp_ratio": 3, "layerscale_value": 0.5, "hidden_act": "gelu_fast", "layer_norm_eps": 0.1}),
    "dinov2 with gates": ("dinov2", {"use_swiglu_ffn": True}),
    "dinov2_with_registers": ("dinov2_with_registers", {"num_register_tokens": 3, "hidden_act": "gelu_pytorch_tanh"}),
    "siglip": ("siglip_vision_model", {"intermediate_size": 41, "layer_norm_eps": 0.1, "image_size": 35}),
}


def tiny(kind: str, model: Any = None, **options: Any) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    config, default, _ = CLASSES[kind]
    upstream = randomise((model or default)(config(**{**TINY, **options})).eval(), 0)
    for name, parameter in upstream.named_parameters():
        parameter.requires_grad_(not name.endswith("mask_token"))  # for pretraining only
    return upstream


def images(config: ViTConfig, number: int = 2) -> np.ndarray:
    shape = (number, config.image_size, config.image_size, config.in_channels)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def outputs_upstream(upstream: torch.nn.Module, x: np.ndarray) -> torch.Tensor:
    """The logits, or where there is no classifier what attention pools, or the class token."""
    result = upstream(torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1))))
    if isinstance(upstream, transformers.SiglipVisionModel):
        return result.pooler_output
    return result.logits if hasattr(result, "logits") else result.last_hidden_state[:, 0]


@eqx.filter_jit
def outputs(model: Any, x: Array) -> Array:
    return jax.vmap(model)(x)


@eqx.filter_jit
@partial(eqx.filter_grad, has_aux=True)
def gradients_and_outputs(model: Any, x: Array) -> tuple[Array, Array]:
    y = jax.vmap(model)(x)
    return jnp.sum(jnp.sin(y)), y


def assert_same_outputs(model: Any, upstream: torch.nn.Module, tolerance: float = 1e-4) -> None:
    x = images(model.config)
    with torch.no_grad():
        assert_close(outputs(model, jnp.asarray(x)), outputs_upstream(upstream, x), tolerance)


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_model_has_a_variants_config_and_its_names_and_shapes(source):
    kind, options, labels, variant, changes = PUBLISHED[source]
    config, model, _ = CLASSES[kind]
    with torch.device("meta"):
        upstream = model(config(num_labels=labels, **options))
    described = {**upstream.config.to_dict(), "architectures": [model.__name__]}
    (_, family, ours) = from_config_json(json.loads(json.dumps(described)))
    assert family is FAMILY
    assert ours == replace(VARIANTS[variant], norm_eps=upstream.config.layer_norm_eps, **changes)
    names = revert_weight_conversion(upstream, upstream.state_dict())
    assert_names_and_shapes((FAMILY, ours), names)


@pytest.mark.parametrize("kind", CLASSES)
def test_options_that_are_not_stated_have_upstreams_defaults(kind):
    config, model, _ = CLASSES[kind]
    stated = {**config().to_dict(), "architectures": [model.__name__]}
    assert from_config_json({"model_type": kind}).config == from_config_json(stated).config


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_are_upstreams(case, saved):
    kind, options = OPTIONS[case]
    upstream = tiny(kind, **options)
    model = eqzoo.load(saved(upstream))
    x = images(model.config)
    theirs = outputs_upstream(upstream, x)
    torch.sin(theirs).sum().backward()
    gradients, ours = gradients_and_outputs(model, jnp.asarray(x))
    assert_close(ours, theirs, 1e-4)
    in_memory = CLASSES[kind][2][::-1]  # the rules for upstream's modules come after those for its files
    assert_same_gradients(gradients, upstream, in_memory, 1e-3)


@pytest.mark.parametrize(
    ("case", "option", "value"),
    [
        ("vit options", "num_attention_heads", 3),
        ("vit options", "layer_norm_eps", "absent"),
        ("vit options", "hidden_act", "absent"),
        ("vit options", "image_size", 32),
        ("vit options", "patch_size", 8),
        ("vit options", "num_channels", "absent"),
        ("vit options", "num_hidden_layers", 2),
        ("vit options", "qkv_bias", True),
        ("vit options", "id2label", "absent"),
        ("vit options", "hidden_size", 48),
        ("vit", "intermediate_size", 40),
        ("deit", "model_type", "vit"),
        ("dinov2", "mlp_ratio", "absent"),
        ("dinov2_with_registers", "num_register_tokens", "absent"),
    ],
)
def test_every_option_counts(case, option, value, saved):
    """With another value in config.json the weights don't fit, or the outputs differ tenfold of what is tolerated."""
    kind, options = OPTIONS[case]
    upstream = tiny(kind, **options)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_outputs(eqzoo.load(saved(upstream, {option: value})), upstream, 1e-3)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_folders_that_transformers_writes(kind, tmp_path, saved):
    """In one file, in shards, with the names that its modules have, and by torch."""
    upstream = tiny(kind)
    one = eqzoo.load(saved(upstream))
    assert_same_outputs(one, upstream)

    upstream.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert eqx.tree_equal(eqzoo.load(tmp_path / "shards"), one)

    upstream.save_pretrained(tmp_path / "modules", save_original_format=False)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "modules"), one)

    (tmp_path / "shards" / "model.safetensors.index.json").unlink()
    for names in (upstream.state_dict(), revert_weight_conversion(upstream, upstream.state_dict())):
        torch.save(dict(names), tmp_path / "shards" / "pytorch_model.bin")
        assert eqx.tree_equal(eqzoo.load(tmp_path / "shards"), one)


@pytest.mark.parametrize("case", OPTIONS)
def test_transformers_reads_what_is_exported(case, tmp_path, saved):
    kind, options = OPTIONS[case]
    upstream = tiny(kind, **options)
    model = eqzoo.load(saved(upstream))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = CLASSES[kind][1].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert_same_outputs(model, back.eval())
    automatic = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert automatic.architectures == [CLASSES[kind][1].__name__]
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


def test_siglip_as_a_whole_gives_its_image_tower(saved):
    config = transformers.SiglipConfig(
        vision_config=TINY, text_config={**TINY, "vocab_size": 9, "intermediate_size": 8, "projection_size": 24}
    )
    upstream = randomise(transformers.SiglipModel(config).eval(), 0)
    assert_same_outputs(eqzoo.load(saved(upstream)), upstream.vision_model)


def test_a_model_without_head_is_exported_as_a_classifier_without_classes(tmp_path, saved):
    upstream = tiny("vit", transformers.ViTModel)
    model = eqzoo.load(saved(upstream))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = CLASSES["vit"][1].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert_same_outputs(model, back.eval())
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_model_of_timms_is_exported(name, tmp_path):
    config = replace(VARIANTS[name], depth=1, image_size=32, num_classes=7)
    model = eqx.filter_jit(ViT)(config, key=jax.random.key(0))
    eqzoo.export(tmp_path / name, model, format="transformers")
    back = transformers.AutoModelForImageClassification if "deit" not in name else CLASSES["deit"][1]
    assert_same_outputs(eqx.nn.inference_mode(model), back.from_pretrained(tmp_path / name).eval())


def test_a_body_is_a_model_without_head_whatever_its_labels(saved):
    """Such as `google/vit-base-patch16-224-in21k`. The pooler, a layer on the class token, stays behind."""
    upstream = tiny("vit", transformers.ViTModel, num_labels=9)
    assert "pooler.dense.weight" in upstream.state_dict()
    model = eqzoo.load(saved(upstream))
    assert model.config.num_classes == 0
    assert_same_outputs(model, upstream)

    with_head = eqzoo.load(saved(upstream), num_classes=4)
    assert with_head.head.weight.shape == (4, 24)
    assert not with_head.head.weight.any()
    assert eqx.tree_equal(with_head.blocks, model.blocks)


def test_a_distilled_body_has_upstreams_tokens(saved):
    upstream = tiny("deit", transformers.DeiTModel)
    model = eqzoo.load(saved(upstream))
    x = images(model.config, 1)
    theirs = upstream(torch.from_numpy(np.moveaxis(x, -1, 1).copy())).last_hidden_state
    assert_close(eqx.filter_jit(model.features)(jnp.asarray(x[0]))[-1], theirs[0], 1e-4)
    assert_close(model(jnp.asarray(x[0])), theirs[0, :2].mean(0), 1e-4)


@pytest.mark.parametrize(
    ("stated", "number"),
    [
        ({}, 2),
        ({"num_labels": 7}, 7),
        ({"id2label": {"0": "cat", "1": "dog", "2": "cow"}}, 3),
        ({"id2label": {"0": "cat"}, "num_labels": 7}, 7),
        ({"id2label": None, "num_labels": 7}, 7),
        ({"id2label": {}}, 0),
        ({"architectures": ["ViTModel"], "num_labels": 7}, 0),
        ({"architectures": None, "num_labels": 7}, 7),
    ],
)
def test_labels_are_counted_as_upstream_counts_them(stated, number, recwarn):
    assert from_config_json({"model_type": "vit", **stated}).config.num_classes == number
    if "ViTModel" not in (stated.get("architectures") or []):
        assert transformers.ViTConfig(**stated).num_labels == number


def test_an_mlp_is_as_wide_as_stated():
    """Whatever the rounding of its ratio to the model's width."""
    for dim, hidden in ((49, 1), (24, 41), (768, 3072), (1408, 6143), (187, 309)):
        stated = {"model_type": "vit", "hidden_size": dim, "num_attention_heads": 1, "intermediate_size": hidden}
        config = from_config_json(stated).config
        assert int(dim * config.mlp_ratio) == hidden
        assert FAMILY.upstreams["transformers_vit"].options.write(config)["intermediate_size"] == hidden
    assert any(int(dim * (hidden / dim)) != hidden for dim, hidden in ((49, 1), (187, 309)))


@pytest.mark.parametrize("image_size", [16, 48])
def test_registers_at_another_image_size_are_upstreams(image_size, saved):
    """Upstream resamples its positions to each image that it sees."""
    upstream = tiny("dinov2_with_registers")
    assert_same_outputs(eqzoo.load(saved(upstream), image_size=image_size), upstream)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("vit", {"hidden_act": "relu"}, "hidden_act='relu' is not supported; eqzoo has 'gelu', "),
        ("vit", {"image_size": [32, 48]}, r"image_size=\[32, 48\] is not square"),
        ("vit", {"image_size": 33}, "image_size=33 is not a multiple of patch_size=8"),
        (
            "vit",
            {"architectures": ["ViTForMaskedImageModeling"]},
            r"architectures=\['ViTForMaskedImageModeling'\] is not supported; "
            "eqzoo has 'ViTForImageClassification' and 'ViTModel'",
        ),
        (
            "deit",
            {"architectures": ["DeiTForImageClassification"]},
            r"architectures=\['DeiTForImageClassification'\] is not supported",
        ),
        (
            "dinov2",
            {"architectures": ["Dinov2ForImageClassification"]},
            r"architectures=\['Dinov2ForImageClassification'\] is not supported; eqzoo has \['Dinov2Model'\]",
        ),
        ("siglip_vision_model", {"vision_use_head": False}, "vision_use_head=False is not supported; eqzoo has True"),
        (
            "dinov2_with_registers",
            {"architectures": ["Dinov2WithRegistersForImageClassification"]},
            r"is not supported; eqzoo has \['Dinov2WithRegistersModel'\]",
        ),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(kind, changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny(kind), changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "avg"}, "transformers has no ViT with pool='avg'"),
        ({"pre_norm": True}, "transformers has no ViT with pre_norm=True"),
        ({"layer_scale": 0.1}, "transformers has no ViT with layer_scale=0.1"),
        ({"registers": 2, "num_classes": 0, "layer_scale": 0.1}, "upstream has no register_positions=True, only False"),
        (
            {"registers": 2, "prefix_positions": False, "num_classes": 0, "layer_scale": 0.1},
            "upstream has no prefix_positions=False, only True",
        ),
        ({"layer_scale": 0.1, "num_classes": 0, "mlp_ratio": 2.5}, "takes a whole number as mlp_ratio, not 2.5"),
        (
            {"registers": 2, "register_positions": False, "num_classes": 0},
            "always has layer scales, but layer_scale=None",
        ),
    ],
)
def test_what_transformers_does_not_have_is_not_exported(options, message, tmp_path):
    config = ViTConfig(**{"dim": 24, "depth": 1, "heads": 3, "image_size": 32, "patch_size": 8, **options})
    model = eqx.filter_jit(ViT)(config, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        eqzoo.export(tmp_path / "ours", model, format="transformers")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        (
            "vit",
            {"dropout": 0.1, "attention_dropout": 0.2},
            {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
        ),
        (
            "dinov2",
            {"dropout": 0.1, "attention_dropout": 0.2, "drop_path": 0.3},
            {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "drop_path_rate": 0.3},
        ),
    ],
)
def test_rates_for_training_are_read_and_written(kind, ours, theirs):
    config = from_config_json({"model_type": kind, **theirs}).config
    assert {name: getattr(config, name) for name in ours} == ours
    written = FAMILY.upstreams[f"transformers_{kind}"].options.write(config)
    assert {name: written[name] for name in theirs} == theirs
    # JSON tells no integer from a float.
    assert from_config_json({"model_type": kind, **dict.fromkeys(theirs, 0)}).config.dropout == 0.0
