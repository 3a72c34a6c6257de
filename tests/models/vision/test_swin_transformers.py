"""Swin is transformers' Swin and Swinv2: published names and shapes; outputs and gradients of every option; folders
that transformers wrote, and folders that it reads."""

import json
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.vision._swin_upstream import TRANSFORMERS_V1, TRANSFORMERS_V2
from eqzoo.models.vision.swin import FAMILY, VARIANTS, Swin
from tests.parity import assert_close, assert_names_and_shapes, assert_same_gradients, mean_square, randomise

CLASSES: dict[str, tuple[Any, Any, Any, Any]] = {
    "swin": (
        transformers.SwinConfig,
        transformers.SwinForImageClassification,
        transformers.SwinModel,
        TRANSFORMERS_V1,
    ),
    "swinv2": (
        transformers.Swinv2Config,
        transformers.Swinv2ForImageClassification,
        transformers.Swinv2Model,
        TRANSFORMERS_V2,
    ),
}

_BASE = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}

# What tells the published configs apart: the class, its options, and our variant.
PUBLISHED: dict[str, tuple[str, dict[str, Any], str]] = {
    "microsoft/swin-tiny-patch4-window7-224": ("swin", {}, "swin_tiny_patch4_window7_224"),
    "microsoft/swin-base-patch4-window12-384": (
        "swin",
        {**_BASE, "window_size": 12, "image_size": 384},
        "swin_base_patch4_window12_384",
    ),
    "microsoft/swinv2-tiny-patch4-window16-256": (
        "swinv2",
        {"window_size": 16, "image_size": 256},
        "swinv2_tiny_window16_256",
    ),
    "microsoft/swinv2-base-patch4-window12to24-192to384-22kto1k-ft": (
        "swinv2",
        {**_BASE, "window_size": 24, "image_size": 384, "pretrained_window_sizes": [12, 12, 12, 6]},
        "swinv2_base_window12to24_192to384",
    ),
}

TINY = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "num_labels": 5}

# Of each class every option, in few models, and images to try.
OPTIONS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "swin": ("swin", {}, (32, 32)),
    "swin options": (
        "swin",
        {"depths": [1, 3], "qkv_bias": False, "num_channels": 1, "patch_size": 2, "mlp_ratio": 3, "window_size": 5},
        (28, 44),
    ),
    "swinv2": ("swinv2", {"window_size": 8, "pretrained_window_sizes": [6, 0]}, (32, 32)),
    "swinv2 options": (
        "swinv2",
        {"depths": [1, 3], "qkv_bias": False, "num_channels": 1, "patch_size": 2, "mlp_ratio": 3.0, "window_size": 5}
        | {"pretrained_window_sizes": [0, 0]},
        (28, 44),
    ),
}


def tiny(kind: str, options: dict[str, Any], *, body: bool = False) -> Any:
    config, classifier, model, _ = CLASSES[kind]
    return randomise((model if body else classifier)(config(**{**TINY, **options})).eval(), 0)


def images(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, height, width, channels)).astype(np.float32)


def outputs_upstream(upstream: Any, x: np.ndarray) -> torch.Tensor:
    result = upstream(torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1))))
    return result.logits if hasattr(result, "logits") else result.pooler_output


@eqx.filter_jit
def outputs(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def assert_same_outputs(model: Any, upstream: Any, size: tuple[int, int] = (32, 32), tolerance: float = 1e-4) -> None:
    x = images(*size, model.config.in_channels)
    with torch.no_grad():
        assert_close(outputs(model, jnp.asarray(x)), outputs_upstream(upstream, x), tolerance)


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_model_is_a_variant_with_its_names_and_shapes(source):
    kind, options, variant = PUBLISHED[source]
    config, classifier, _, _ = CLASSES[kind]
    with torch.device("meta"):
        upstream = classifier(config(num_labels=1000, **options))
    described = {**upstream.config.to_dict(), "architectures": [classifier.__name__]}
    (_, family, ours) = from_config_json(json.loads(json.dumps(described)))
    assert family is FAMILY
    assert ours == replace(VARIANTS[variant], cut_windows=kind == "swinv2", pad_first=True)
    norms = [module for module in upstream.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {1e-5}
    assert_names_and_shapes((FAMILY, ours), revert_weight_conversion(upstream, upstream.state_dict()))


@pytest.mark.parametrize("kind", CLASSES)
def test_options_that_are_not_stated_have_upstreams_defaults(kind):
    config, classifier, _, _ = CLASSES[kind]
    stated = {**config().to_dict(), "architectures": [classifier.__name__]}
    assert from_config_json({"model_type": kind}).config == from_config_json(stated).config


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_are_upstreams(case, saved):
    kind, options, size = OPTIONS[case]
    upstream = tiny(kind, options)
    model, state = eqzoo.load(saved(upstream), trainable=True)
    x = images(*size, model.config.in_channels)
    theirs = outputs_upstream(upstream, x)
    theirs.square().mean().backward()
    (_, (ours, _)), gradients = mean_square(eqx.nn.inference_mode(model), state, jnp.asarray(x))
    assert_close(ours, theirs, 1e-4)
    in_memory = CLASSES[kind][3][::-1]  # the rules for upstream's modules come after those for its files
    assert_same_gradients(gradients, upstream, in_memory, 1e-3)


@pytest.mark.parametrize("case", ["swin", "swinv2"])
def test_folders_are_read_and_written(case, tmp_path, saved):
    """With the names that transformers writes, with those that its modules have, and as eqzoo exports them."""
    kind, options, _ = OPTIONS[case]
    upstream = tiny(kind, options)
    one = eqzoo.load(saved(upstream))
    upstream.save_pretrained(tmp_path / "modules", save_original_format=False)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "modules"), one)

    eqzoo.export(tmp_path / "ours", one, format="transformers")
    back, report = CLASSES[kind][1].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in upstream.state_dict().items())
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), one)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_body_is_a_model_without_head_whatever_its_labels(kind, saved):
    upstream = tiny(kind, {"pretrained_window_sizes": [0, 0]} if kind == "swinv2" else {}, body=True)
    model = eqzoo.load(saved(upstream))
    assert model.config.num_classes == 0
    assert_same_outputs(model, upstream)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window16_256"])
def test_a_model_of_timms_whose_windows_fit_is_exported(name, tmp_path):
    config = replace(VARIANTS[name], dim=32, depths=(1, 1, 1, 1), heads=(1, 2, 4, 8), num_classes=3)
    model = eqx.filter_jit(Swin)(config, key=jax.random.key(0))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert_same_outputs(eqx.nn.inference_mode(model), back, (config.image_size, config.image_size))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("swin_s3_tiny_224", {}, r"one window for all stages, not windows=\(7, 7, 14, 7\)"),
        ("swin_tiny_patch4_window7_224", {"image_size": 256}, "windows of 7 don't divide"),
        ("swin_tiny_patch4_window7_224", {"image_size": 192}, "windows of 7 don't divide"),
        ("swinv2_tiny_window8_256", {"image_size": 224}, "windows of 8 don't divide"),
    ],
)
def test_what_transformers_computes_otherwise_is_not_exported(name, changes, message, tmp_path):
    config = replace(VARIANTS[name], dim=32, depths=(1, 1, 1, 1), heads=(1, 2, 4, 8), **changes)
    model = eqx.filter_eval_shape(Swin, config, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        eqzoo.export(tmp_path / "ours", model, format="transformers")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("swin", {"hidden_act": "relu"}, "hidden_act='relu' is not supported; eqzoo has 'gelu'"),
        ("swin", {"use_absolute_embeddings": True}, "use_absolute_embeddings=True is not supported"),
        ("swin", {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 is not supported"),
        ("swin", {"architectures": ["SwinBackbone"]}, r"architectures=\['SwinBackbone'\] is not supported"),
        ("swinv2", {"image_size": [32, 48]}, r"image_size=\[32, 48\] is not square"),
        ("swinv2", {"image_size": 36}, "image_size=36 is not supported; eqzoo has those whose maps halve 1 times"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        from_config_json({"model_type": kind, **TINY, **changes})


@pytest.mark.parametrize(
    ("case", "option", "value"),
    [
        ("swin options", "depths", [2, 2]),
        ("swin options", "num_heads", [4, 2]),
        ("swin options", "window_size", 4),
        ("swin options", "qkv_bias", True),
        ("swin options", "patch_size", 4),
        ("swin options", "mlp_ratio", 4),
        ("swinv2", "window_size", 4),
        ("swinv2", "pretrained_window_sizes", [0, 0]),
        ("swinv2", "image_size", 16),
        ("swinv2", "model_type", "swin"),
    ],
)
def test_every_option_counts(case, option, value, saved):
    """With another value in config.json the weights don't fit, or the outputs differ tenfold of what is tolerated."""
    kind, options, size = OPTIONS[case]
    upstream = tiny(kind, options)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_outputs(eqzoo.load(saved(upstream, {option: value})), upstream, size, 1e-3)
