"""FCN and DeepLabV3 are torchvision's: names, shapes, outputs of every pixel, gradients, running statistics."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
from torchvision.models import get_model
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation._utils import _SimpleSegmentationModel
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead

import eqzoo
from eqzoo import nn
from eqzoo._model import _merge
from eqzoo.checkpoint import unfill
from eqzoo.models.vision.segmentation import FAMILY, TORCHVISION, VARIANTS, SegmenterConfig
from tests.parity import (
    array,
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    from_torch,
    randomise,
)


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_same_names_and_shapes(name, aux):
    with torch.device("meta"):
        upstream = get_model(name, weights=None, weights_backbone=None, aux_loss=aux)
    assert_names_and_shapes((FAMILY, replace(VARIANTS[name], aux_head=aux)), upstream.state_dict())
    assert {type(module).__name__ for module in upstream.modules()} <= {
        *("FCN", "DeepLabV3", "FCNHead", "DeepLabHead", "ASPP", "ASPPConv", "ASPPPooling", "IntermediateLayerGetter"),
        *("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Sequential", "Bottleneck", "Dropout", "ModuleList"),
        "AdaptiveAvgPool2d",
    }


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def mean_squares(model, state, images):
    call = lambda image: model.logits_with_auxiliary(image, state)
    outputs, new_state = jax.vmap(call, axis_name="batch", out_axes=(0, None))(images)
    return sum(jnp.mean(each**2) for each in outputs), (outputs, new_state)


@pytest.mark.parametrize("decoder", ["fcn", "aspp"])
def test_logits_of_both_heads_gradients_and_statistics_in_training(decoder):
    """In double precision: many batch norms over two small maps turn rounding into errors of 1e-4."""
    backbone = IntermediateLayerGetter(
        timm.create_model("resnet14t", output_stride=8), {"layer4": "out", "layer3": "aux"}
    )
    head = FCNHead(2048, 5) if decoder == "fcn" else DeepLabHead(2048, 5)
    upstream = randomise(_SimpleSegmentationModel(backbone, head, FCNHead(1024, 5)), 0).train()
    for module in upstream.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    config = SegmenterConfig(
        backbone="resnet14t", decoder=decoder, aux_head=True, num_classes=5, dropout=0.0, pyramid_dropout=0.0
    )
    pair = from_torch((FAMILY, config), upstream)
    images = np.random.default_rng(0).normal(size=(2, 65, 50, 3))
    theirs = upstream.double()(torch.tensor(images).permute(0, 3, 1, 2))
    (theirs["out"].square().mean() + theirs["aux"].square().mean()).backward()
    with jax.enable_x64(True):
        widen = lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf
        model, state = jax.tree.map(widen, pair)
        (_, (outputs, state)), gradients = mean_squares(model, state, jnp.asarray(images))
        after = unfill(_merge(model, state), TORCHVISION)
        frozen = eqzoo.freeze(model, state)
        (output,) = eqx.filter_jit(frozen.logits_with_auxiliary)(jnp.asarray(images[0]))
    for ours, key in zip(outputs, ("out", "aux"), strict=True):
        assert_close(ours, theirs[key].permute(0, 2, 3, 1), 1e-9)
    assert_same_gradients(gradients, upstream, TORCHVISION, 1e-6)
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
