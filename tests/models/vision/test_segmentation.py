"""FCN, DeepLabV3 and LR-ASPP are torchvision's: names, shapes, every pixel's logits, gradients, running statistics."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation._utils import _SimpleSegmentationModel
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead

import eqzoo
from eqzoo import nn
from eqzoo._model import _merge, _skeleton
from eqzoo.checkpoint import unfill
from eqzoo.models.vision.segmentation import (
    FAMILY,
    TORCHVISION,
    TORCHVISION_LITE,
    TORCHVISION_MOBILENET,
    VARIANTS,
    Segmenter,
    SegmenterConfig,
)
from tests.parity import (
    array,
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    from_torch,
    number_of_parameters,
    randomise,
)


def test_every_model_of_torchvisions_is_there():
    assert {*list_models(module=torchvision.models.segmentation)} == {*VARIANTS}


@pytest.mark.parametrize(
    ("name", "aux"), [*((name, False) for name in VARIANTS), *((name, True) for name in VARIANTS if name[:2] != "lr")]
)
def test_a_variant_has_the_same_names_and_shapes(name, aux):
    with torch.device("meta"):
        upstream = get_model(name, weights=None, weights_backbone=None, aux_loss=aux)
    config = replace(VARIANTS[name], aux_head=aux)
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    ours = _skeleton(partial(Segmenter, config))[0]
    norms = {(each.eps, each.momentum) for each in upstream.modules() if isinstance(each, torch.nn.BatchNorm2d)}
    assert {(each.eps, each.momentum) for each in parts(ours, nn.BatchNorm)} == norms
    if aux or name.startswith("lr"):  # what the published weights hold
        (weights,) = get_model_weights(name)
        assert weights.meta["num_params"] == number_of_parameters(FAMILY, config)
    assert {type(module).__name__ for module in upstream.modules()} <= {
        *("FCN", "DeepLabV3", "FCNHead", "DeepLabHead", "ASPP", "ASPPConv", "ASPPPooling", "IntermediateLayerGetter"),
        *("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Sequential", "Bottleneck", "Dropout", "ModuleList"),
        *("LRASPP", "LRASPPHead", "InvertedResidual", "Conv2dNormActivation", "SqueezeExcitation"),
        *("AdaptiveAvgPool2d", "Hardswish", "Hardsigmoid", "Sigmoid"),
    }


def parts(tree, kind):
    is_part = lambda node: isinstance(node, kind)
    return [part for part in jax.tree.leaves(tree, is_leaf=is_part) if is_part(part)]


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def mean_squares(model, state, images):
    call = lambda image: model.logits_with_auxiliary(image, state)
    outputs, new_state = jax.vmap(call, axis_name="batch", out_axes=(0, None))(images)
    return sum(jnp.mean(each**2) for each in outputs), (outputs, new_state)


def on_a_resnet(decoder):
    backbone = IntermediateLayerGetter(
        timm.create_model("resnet14t", output_stride=8), {"layer4": "out", "layer3": "aux"}
    )
    head = FCNHead(2048, 5) if decoder == "fcn" else DeepLabHead(2048, 5)
    config = SegmenterConfig(backbone="resnet14t", decoder=decoder, aux_head=True, num_classes=5)
    return config, _SimpleSegmentationModel(backbone, head, FCNHead(1024, 5))


def on_a_mobilenet(name, **options):
    upstream = get_model(name, weights=None, weights_backbone=None, num_classes=5, **options)
    return replace(VARIANTS[name], num_classes=5, aux_head=bool(options)), upstream


MODELS = {
    "fcn": (partial(on_a_resnet, "fcn"), TORCHVISION),
    "aspp": (partial(on_a_resnet, "aspp"), TORCHVISION),
    "aspp on a MobileNet": (
        partial(on_a_mobilenet, "deeplabv3_mobilenet_v3_large", aux_loss=True),
        TORCHVISION_MOBILENET,
    ),
    "lraspp": (partial(on_a_mobilenet, "lraspp_mobilenet_v3_large"), TORCHVISION_LITE),
}


@pytest.mark.parametrize(("make", "rules"), MODELS.values(), ids=MODELS)
def test_logits_of_both_heads_gradients_and_statistics_in_training(make, rules):
    """In double precision: many batch norms over two small maps turn rounding into errors of 1e-4."""
    config, upstream = make()
    randomise(upstream, 0).train()
    for module in upstream.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    config = replace(config, dropout=0.0, pyramid_dropout=0.0)
    pair = from_torch((FAMILY, config), upstream)
    images = np.random.default_rng(0).normal(size=(2, 65, 50, 3))
    theirs = upstream.double()(torch.tensor(images).permute(0, 3, 1, 2))
    sum(each.square().mean() for each in theirs.values()).backward()
    with jax.enable_x64(True):
        widen = lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf
        model, state = jax.tree.map(widen, pair)
        (_, (outputs, state)), gradients = mean_squares(model, state, jnp.asarray(images))
        after = unfill(_merge(model, state), rules)
        frozen = eqzoo.freeze(model, state)
        (output,) = eqx.filter_jit(frozen.logits_with_auxiliary)(jnp.asarray(images[0]))
    for ours, each in zip(outputs, theirs.values(), strict=True):  # "out", and perhaps "aux"
        assert_close(ours, each.permute(0, 2, 3, 1), 1e-9)
    assert_same_gradients(gradients, upstream, rules, 1e-6)
    for key, buffer in upstream.named_buffers():
        assert_close(after[key], buffer, 1e-9)
    with torch.no_grad():
        theirs = upstream.eval()(torch.tensor(images[:1]).permute(0, 3, 1, 2))["out"][0]
    assert_close(output, theirs.permute(1, 2, 0), 1e-9)


@pytest.mark.parametrize(("size", "new"), [((5, 7), (40, 50)), ((1, 1), (6, 3)), ((9, 8), (9, 8)), ((8, 9), (4, 5))])
def test_resizing_is_torchs(size, new):
    x = np.random.default_rng(0).normal(size=(*size, 2)).astype(np.float32)
    there = torch.nn.functional.interpolate(torch.tensor(x).permute(2, 0, 1)[None], size=new, mode="bilinear")[0]
    assert_close(nn.resize_bilinear(array(torch.tensor(x)), new), there.permute(1, 2, 0))


@pytest.mark.parametrize(
    ("backbone", "sentence"),
    [
        ("vit_b_16", "backbone='vit_b_16' can't be dilated; pass output_stride=32, or choose a ResNet"),
        ("gpt2", "backbone='gpt2' is no vision model with feature maps"),
    ],
)
def test_a_backbone_that_does_not_serve_is_refused(backbone, sentence):
    """Nor one whose features are tokens, whatever the stride."""
    with pytest.raises(ValueError, match="ViT gives tokens, not maps; choose a backbone such as 'resnet50'"):
        eqzoo.create("fcn_resnet50", backbone="vit_tiny_patch16_224", output_stride=32, key=jax.random.key(0))
    with pytest.raises(ValueError, match=sentence):
        eqzoo.create("fcn_resnet50", backbone=backbone, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"decoder": "lraspp", "aux_head": True},
            "decoder='lraspp', which reads the side map itself; leave aux_head out",
        ),
        ({"side": -5}, "side=-5 is no index of the 4 maps of 'resnet50'"),
        ({"read": "first_features"}, "read='first_features' is no method of ResNet; pass read='features'"),
    ],
)
def test_what_can_not_be_read_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        eqzoo.create("fcn_resnet50", **options, key=jax.random.key(0))


def test_an_export_loads_into_torchvision(tmp_path):
    model, state = eqzoo.create("lraspp_mobilenet_v3_large", num_classes=3, key=jax.random.key(0))
    eqzoo.export(tmp_path / "model.pth", model, state, format="torchvision")
    upstream = get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3).eval()
    upstream.load_state_dict(torch.load(tmp_path / "model.pth"), strict=True)
    image = np.random.default_rng(0).normal(size=(33, 48, 3)).astype(np.float32)
    ours = eqx.filter_jit(eqzoo.freeze(model, state))(jnp.asarray(image))
    with torch.no_grad():
        theirs = upstream(torch.tensor(image).permute(2, 0, 1)[None])["out"][0]
    assert_close(ours, theirs.permute(1, 2, 0), 1e-4)
