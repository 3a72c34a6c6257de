"""ResNet is transformers': published names and shapes; outputs, gradients and running statistics of every option;
folders that transformers wrote, and folders that it reads."""

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
from jaxtyping import Array

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo._model import _merge
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._resnet_upstream import TRANSFORMERS
from eqzoo.models.vision.resnet import FAMILY, VARIANTS, ResNet, ResNetConfig
from tests.parity import assert_close, assert_names_and_shapes, assert_same_gradients, mean_square, randomise

BASIC = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}

# What the published configs state besides the defaults, and our variant.
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "microsoft/resnet-18": ({**BASIC, "depths": [2, 2, 2, 2], "num_labels": 1000}, "resnet18"),
    "microsoft/resnet-34": ({**BASIC, "depths": [3, 4, 6, 3], "num_labels": 1000}, "resnet34"),
    "microsoft/resnet-50": ({"num_labels": 1000}, "resnet50"),
    "microsoft/resnet-101": ({"depths": [3, 4, 23, 3], "num_labels": 1000}, "resnet101"),
    "microsoft/resnet-152": ({"depths": [3, 8, 36, 3], "num_labels": 1000}, "resnet152"),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "bottleneck": {"hidden_sizes": [32, 48, 80], "depths": [1, 3, 2], "num_labels": 5},
    "basic, one channel": {
        "layer_type": "basic",
        "hidden_sizes": [64, 24],
        "depths": [2, 1],
        "num_channels": 1,
        "num_labels": 3,
    },
}


def tiny(option: str, model: Any = transformers.ResNetForImageClassification) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    return randomise(model(transformers.ResNetConfig(**OPTIONS[option])).eval(), 0)


def batch(channels: int) -> tuple[np.ndarray, torch.Tensor]:
    images = np.random.default_rng(1).normal(size=(4, 71, 62, channels)).astype(np.float32)
    return images, torch.tensor(images).permute(0, 3, 1, 2)


@eqx.filter_jit
def outputs(model: Any, x: Array) -> Array:
    return jax.vmap(model)(x)


def assert_same_outputs(model: Any, upstream: torch.nn.Module) -> None:
    images, torch_images = batch(model.config.in_channels)
    with torch.no_grad():
        result: Any = upstream(torch_images)
    theirs = result.logits if hasattr(result, "logits") else result.pooler_output.flatten(1)
    assert_close(outputs(model, jnp.asarray(images)), theirs, 1e-4)


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_model_is_a_variant_with_its_names_and_shapes(source):
    options, variant = PUBLISHED[source]
    with torch.device("meta"):
        upstream = transformers.ResNetForImageClassification(transformers.ResNetConfig(**options))
    described = {**upstream.config.to_dict(), "architectures": ["ResNetForImageClassification"]}
    (_, family, config) = from_config_json(json.loads(json.dumps(described)))
    assert family is FAMILY
    assert config == VARIANTS[variant]
    assert_names_and_shapes(variant, upstream.state_dict())


def test_options_that_are_not_stated_have_upstreams_defaults():
    stated = {**transformers.ResNetConfig().to_dict(), "architectures": ["ResNetForImageClassification"]}
    unstated = from_config_json({"model_type": "resnet"}).config
    assert unstated == from_config_json(stated).config == replace(VARIANTS["resnet50"], num_classes=2)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics_are_upstreams(option, training, saved):
    upstream = tiny(option)
    model, state = eqzoo.load(saved(upstream), trainable=True)
    model = model if training else eqx.nn.inference_mode(model)
    upstream.train(training)
    images, torch_images = batch(model.config.in_channels)

    (_, (outputs, state)), gradients = mean_square(model, state, jnp.asarray(images))
    theirs = upstream(torch_images).logits
    theirs.square().mean().backward()
    assert_close(outputs, theirs, 1e-4)
    assert_same_gradients(gradients, upstream, TRANSFORMERS)
    after = unfill(_merge(model, state), TRANSFORMERS)
    for name, buffer in upstream.named_buffers():
        assert_close(after[name], buffer, 1e-5)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_folders_that_transformers_writes(option, tmp_path, saved):
    """In one file, in shards, and by torch."""
    upstream = tiny(option)
    one = eqzoo.load(saved(upstream))
    assert_same_outputs(one, upstream)

    upstream.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert eqx.tree_equal(eqzoo.load(tmp_path / "shards"), one)

    (tmp_path / "shards" / "model.safetensors.index.json").unlink()
    torch.save(upstream.state_dict(), tmp_path / "shards" / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "shards"), one)


@pytest.mark.parametrize("option", OPTIONS)
def test_transformers_reads_what_is_exported(option, tmp_path, saved):
    upstream = tiny(option)
    pair = eqzoo.load(saved(upstream), trainable=True)
    eqzoo.export(tmp_path / "ours", *pair, format="transformers")
    back, report = type(upstream).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in upstream.state_dict().items())
    _, torch_images = batch(pair[0].config.in_channels)
    with torch.no_grad():
        assert torch.equal(back.eval()(torch_images).logits, upstream(torch_images).logits)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours", trainable=True), pair)


def test_a_body_is_a_model_without_head_whatever_its_labels(tmp_path, saved):
    upstream = tiny("bottleneck", transformers.ResNetModel)
    assert upstream.config.num_labels == 5
    model = eqzoo.load(saved(upstream))
    assert model.config.num_classes == 0
    assert_same_outputs(model, upstream)

    eqzoo.export(tmp_path / "ours", model, format="transformers")
    classifier: Any = transformers.ResNetForImageClassification
    back, report = classifier.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert_same_outputs(model, back.eval())


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("bottleneck", {"depths": [1, 2, 2]}),
        ("bottleneck", {"hidden_sizes": [32, 48, 84]}),
        ("bottleneck", {"layer_type": "basic"}),
        ("bottleneck", {"num_channels": 1}),
        ("bottleneck", {"id2label": {"0": "cat"}}),
        ("basic, one channel", {"layer_type": "bottleneck"}),
    ],
)
def test_every_option_counts(option, changes, saved):
    with pytest.raises(CheckpointError, match="does not fit resnet: "):
        eqzoo.load(saved(tiny(option), changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"downsample_in_bottleneck": True}, "downsample_in_bottleneck=True is not supported; eqzoo has False"),
        ({"downsample_in_first_stage": True}, "downsample_in_first_stage=True is not supported; eqzoo has False"),
        ({"embedding_size": 32}, "embedding_size=32 is not supported; eqzoo has 64"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; eqzoo has 'relu'"),
        ({"layer_type": "wide"}, "layer_type='wide' is not supported; eqzoo has 'basic', 'bottleneck'"),
        ({"hidden_sizes": [32, 50, 80]}, r"hidden_sizes=\[32, 50, 80\] of a bottleneck are not supported"),
        ({"depths": [1, 3]}, r"depths=\(1, 3\) and widths=\(8, 12, 20\) differ in length"),
        ({"architectures": ["ResNetBackbone"]}, r"architectures=\['ResNetBackbone'\] is not supported"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny("bottleneck"), changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cardinality": 4}, "transformers has no ResNet with cardinality=4"),
        ({"base_width": 128}, "transformers has no ResNet with base_width=128"),
        ({"stem": "deep"}, "transformers has no ResNet with stem='deep'"),
        ({"shortcut": "pool"}, "transformers has no ResNet with shortcut='pool'"),
        ({"attention": "eca"}, "transformers has no ResNet with attention='eca'"),
    ],
)
def test_what_transformers_does_not_have_is_not_exported(options, message, tmp_path):
    config = ResNetConfig(block="bottleneck", depths=(1,), widths=(16,), **options)
    pair = eqx.filter_eval_shape(eqx.nn.make_with_state(ResNet), config, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        eqzoo.export(tmp_path / "ours", *pair, format="transformers")
    assert not (tmp_path / "ours").exists()
