"""ConvNeXt is transformers', of version 1, 2 and DINOv3: published configs, names and shapes; outputs and gradients of
every option; folders that transformers wrote, and folders that it reads."""

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

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo._model import _skeleton
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.vision._convnext_upstream import TRANSFORMERS, TRANSFORMERS_DINOV3, TRANSFORMERS_V2
from eqzoo.models.vision.convnext import FAMILY, VARIANTS, ConvNeXt, ConvNeXtConfig
from tests.parity import array, assert_close, assert_names_and_shapes, assert_same_gradients, mean_square, randomise

# By `model_type`: the config, the model that our options describe, and the rules for its names in memory.
CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "convnext": (transformers.ConvNextConfig, transformers.ConvNextForImageClassification, TRANSFORMERS),
    "convnextv2": (transformers.ConvNextV2Config, transformers.ConvNextV2ForImageClassification, TRANSFORMERS_V2),
    "dinov3_convnext": (transformers.DINOv3ConvNextConfig, transformers.DINOv3ConvNextModel, TRANSFORMERS_DINOV3),
}

LINEAR = {"head_norm_eps": 1e-12, "conv_mlp": False, "drop_path": 0.0}

# What the published configs state besides the defaults, and how our variant differs.
PUBLISHED: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "facebook/convnext-tiny-224": ("convnext", {"num_labels": 1000}, "convnext_tiny", LINEAR),
    "facebook/convnext-xlarge-224-22k": (
        "convnext",
        {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 3, 27, 3], "num_labels": 21841},
        "convnext_xlarge",
        {**LINEAR, "num_classes": 21841},
    ),
    "facebook/convnextv2-atto-1k-224": (
        "convnextv2",
        {"hidden_sizes": [40, 80, 160, 320], "depths": [2, 2, 6, 2], "num_labels": 1000},
        "convnextv2_atto",
        LINEAR,
    ),
    "facebook/convnextv2-huge-22k-512": (
        "convnextv2",
        {"hidden_sizes": [352, 704, 1408, 2816], "depths": [3, 3, 27, 3], "image_size": 512, "num_labels": 1000},
        "convnextv2_huge",
        LINEAR,
    ),
    "facebook/dinov3-convnext-tiny-pretrain-lvd1689m": (
        "dinov3_convnext",
        {},
        "convnext_tiny",
        {"num_classes": 0, "drop_path": 0.0},
    ),
}

TINY = {"hidden_sizes": [16, 12, 24], "depths": [1, 3, 2]}

# Of each class every option, in few models.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "convnext": ("convnext", {"layer_norm_eps": 0.1, "patch_size": [2, 2], "num_labels": 5}),
    "without layer scale": (
        "convnext",
        {"layer_scale_init_value": 0.0, "num_channels": 1, "hidden_act": "gelu_new", "num_labels": 3},
    ),
    "convnextv2": ("convnextv2", {"layer_norm_eps": 0.1, "hidden_act": "swish", "num_labels": 5}),
    "dinov3_convnext": ("dinov3_convnext", {"layer_norm_eps": 0.1, "hidden_act": "quick_gelu"}),
}


def tiny(option: str, model: Any = None) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    kind, options = OPTIONS[option]
    config, default, _ = CLASSES[kind]
    stages = {} if kind == "dinov3_convnext" else {"num_stages": 3}
    return randomise((model or default)(config(**{**TINY, **stages, **options})).eval(), 0)


def batch(channels: int) -> tuple[np.ndarray, torch.Tensor]:
    images = np.random.default_rng(1).normal(size=(4, 39, 34, channels)).astype(np.float32)
    return images, torch.tensor(images).permute(0, 3, 1, 2)


def output(result: Any) -> torch.Tensor:
    return result.logits if hasattr(result, "logits") else result.pooler_output


@eqx.filter_jit
def outputs(model: Any, images: jax.Array) -> jax.Array:
    return jax.vmap(model)(images)


def assert_same_outputs(model: Any, upstream: torch.nn.Module) -> None:
    images, torch_images = batch(model.config.in_channels)
    with torch.no_grad():
        assert_close(outputs(model, jnp.asarray(images)), output(upstream(torch_images)), 1e-4)


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_model_is_a_variant_with_its_names_and_shapes(source):
    kind, options, variant, changes = PUBLISHED[source]
    config, model, _ = CLASSES[kind]
    with torch.device("meta"):
        upstream = model(config(**options))
    described = {**upstream.config.to_dict(), "architectures": [model.__name__]}
    (_, family, ours) = from_config_json(json.loads(json.dumps(described)))
    assert family is FAMILY
    assert ours == replace(VARIANTS[variant], **changes)
    on_disk = {name.removeprefix("model."): tensor for name, tensor in upstream.state_dict().items()}  # DINOv3's
    assert_names_and_shapes((FAMILY, ours), on_disk)


@pytest.mark.parametrize("kind", CLASSES)
def test_options_that_are_not_stated_have_upstreams_defaults(kind):
    config, model, _ = CLASSES[kind]
    stated = {**config().to_dict(), "architectures": [model.__name__]}
    assert from_config_json({"model_type": kind}).config == from_config_json(stated).config


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_and_gradients_are_upstreams(option, saved):
    upstream = tiny(option)
    model, state = eqzoo.load(saved(upstream), trainable=True)
    images, torch_images = batch(model.config.in_channels)
    (_, (ours, _)), gradients = mean_square(model, state, jnp.asarray(images))
    theirs = output(upstream(torch_images))
    theirs.square().mean().backward()
    assert_close(ours, theirs, 1e-4)
    assert_same_gradients(gradients, _as_on_disk(upstream), CLASSES[OPTIONS[option][0]][2])


def _as_on_disk(upstream: torch.nn.Module) -> Any:
    """DINOv3's parameters under the names of its files."""

    class Renamed:
        def named_parameters(self):
            return ((name.removeprefix("model."), parameter) for name, parameter in upstream.named_parameters())

    return Renamed()


@pytest.mark.parametrize("option", OPTIONS)
def test_the_names_in_memory_load_too(option, tmp_path, saved):
    upstream = tiny(option)
    folder = saved(upstream)
    one = eqzoo.load(folder)
    (folder / "model.safetensors").unlink()
    torch.save(upstream.state_dict(), folder / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(folder), one)


@pytest.mark.parametrize("option", OPTIONS)
def test_transformers_reads_what_is_exported(option, tmp_path, saved):
    upstream = tiny(option)
    model = eqzoo.load(saved(upstream))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = type(upstream).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in upstream.state_dict().items())
    _, torch_images = batch(model.config.in_channels)
    with torch.no_grad():
        assert_close(array(output(back.eval()(torch_images))), output(upstream(torch_images)), 1e-6)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


@pytest.mark.parametrize(
    ("option", "body"), [("convnext", transformers.ConvNextModel), ("convnextv2", transformers.ConvNextV2Model)]
)
def test_a_body_is_a_model_without_head_whatever_its_labels(option, body, saved):
    upstream = tiny(option, body)
    assert upstream.config.num_labels == 5
    model = eqzoo.load(saved(upstream))
    assert model.config.num_classes == 0
    assert_same_outputs(model, upstream)


def test_a_small_model_of_timms_becomes_one_of_transformers(tmp_path):
    """Its 1x1 convolutions are linear layers there."""
    options: dict[str, Any] = {"conv_mlp": True, "response_norm": True, "layer_scale": None, "num_classes": 5}
    config = ConvNeXtConfig(depths=(1, 2, 1, 1), widths=(8, 12, 16, 24), **options)
    model = eqx.nn.inference_mode(ConvNeXt(config, key=jax.random.key(0)))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = transformers.ConvNextV2ForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values())
    assert_same_outputs(model, back.eval())


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("convnext", {"depths": [1, 2, 2]}),
        ("convnext", {"hidden_sizes": [16, 12, 20]}),
        ("convnext", {"patch_size": 4}),
        ("convnext", {"num_channels": 1}),
        ("convnext", {"layer_scale_init_value": 0.0}),
        ("convnext", {"id2label": {"0": "cat"}}),
        ("convnext", {"model_type": "convnextv2", "architectures": ["ConvNextV2ForImageClassification"]}),
        ("dinov3_convnext", {"depths": [1, 2, 2]}),
    ],
)
def test_every_option_counts(option, changes, saved):
    with pytest.raises(CheckpointError, match="does not fit .*convnext"):
        eqzoo.load(saved(tiny(option), changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "selu"}, "hidden_act='selu' is not supported; eqzoo has 'gelu'"),
        ({"patch_size": [4, 2]}, r"patch_size=\[4, 2\] is not supported; eqzoo has square patches"),
        ({"num_stages": 2}, "num_stages=2 is not supported"),
        ({"hidden_sizes": [16, 12]}, r"depths=\(1, 3, 2\), widths=\(16, 12\) and kernel_sizes"),
        ({"architectures": ["ConvNextBackbone"]}, r"architectures=\['ConvNextBackbone'\] is not supported"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny("convnext"), changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_sizes": (7, 7, 7, 5)}, r"kernels of size 7, but kernel_sizes=\(7, 7, 7, 5\)"),
        ({"stem": "overlap"}, "transformers has no ConvNeXt with stem='overlap'"),
        ({"norm": "rms"}, "transformers has no ConvNeXt with norm='rms'"),
        ({"head_norm_first": True}, "transformers has no ConvNeXt with head_norm_first=True"),
        ({"head_hidden": 8}, "transformers has no ConvNeXt with head_hidden=8"),
        ({"response_norm": True}, "transformers has no ConvNeXt with response_norm=True .* or layer_scale=1e-06"),
        ({"norm_eps": 0.1}, "upstream has no num_classes=1000, only 0"),
    ],
)
def test_what_transformers_does_not_have_is_not_exported(options, message, tmp_path):
    config = replace(VARIANTS["test_convnext2"], **{"norm_eps": 1e-6, **options})
    model, _ = _skeleton(lambda key: ConvNeXt(config, key=key))
    with pytest.raises(ValueError, match=message):
        eqzoo.export(tmp_path / "ours", model, format="transformers")
    assert not (tmp_path / "ours").exists()
