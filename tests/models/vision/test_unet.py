"""U-Net is that of segmentation_models_pytorch: names, shapes, outputs of every pixel, gradients, statistics."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch

import eqzoo
from eqzoo._model import _skeleton
from eqzoo.checkpoint import Rule, prefixed
from eqzoo.models._family import Upstream
from eqzoo.models.vision import _convnext_upstream as convnext
from eqzoo.models.vision.unet import (
    DECODER,
    FAMILY,
    SMP,
    SMP_TIMM_MOBILENET,
    SMP_TIMM_RESNET,
    VARIANTS,
    UNet,
    UNetConfig,
)
from tests.parity import assert_close, assert_names_and_shapes, assert_same_results, randomise

WIDTHS = (24, 16, 16, 8, 8)


class Unet(smp.Unet):
    def __init__(self, encoder, widths=WIDTHS, classes=2):
        super().__init__(encoder, encoder_weights=None, decoder_channels=widths, classes=classes)

    def forward(self, x):
        """Channels last, as the comparison wants it."""
        return super().forward(x).permute(0, 2, 3, 1)


# As timm calls the parts of a ConvNeXt of which it takes the maps only; the last norm is not among them.
CONVNEXT = tuple(
    replace(rule, source=rule.source.replace(r"stem\.", "stem_").replace(r"stages\.", "stages_"))
    for rule in convnext.TIMM
    if not rule.source.startswith("head")
)

# A ResNet of smp's; one of timm's with a deep stem; one that has a map at half the image's size of itself; one without.
ENCODERS = {
    "resnet18": ("resnet18", SMP),
    "resnet10t": ("tu-resnet10t", SMP_TIMM_RESNET),
    "test_efficientnet": ("tu-test_efficientnet", SMP_TIMM_MOBILENET),
    "test_convnext": (
        "tu-test_convnext",
        (
            *prefixed(r"encoder\.model\.", "backbone.", CONVNEXT),
            Rule(r"unused\.(weight|bias)", "backbone.norm.{0}"),
            *DECODER,
        ),
    ),
}


@pytest.mark.parametrize("backbone", ENCODERS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics(backbone, training):
    encoder, rules = ENCODERS[backbone]
    upstream = Unet(encoder)
    if backbone == "test_convnext":
        upstream.unused = torch.nn.LayerNorm(upstream.encoder.out_channels[-1])
    randomise(upstream, 0)
    family = FAMILY._replace(upstreams={"smp": Upstream(rules)})
    images = np.random.default_rng(1).normal(size=(4, 71, 62, 3)).astype(np.float32)
    config = UNetConfig(backbone=backbone, widths=WIDTHS, num_classes=2)
    assert_same_results((family, config), upstream, images, rules, training=training)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_same_names_and_shapes_as_the_library(name):
    backbone = VARIANTS[name].backbone
    with torch.device("meta"):
        encoder = backbone if backbone.startswith("resne") else f"tu-{backbone}"
        upstream = smp.Unet(encoder, encoder_weights=None)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    assert [type(module).__name__ for module in upstream.decoder.blocks[0].children()] == [
        *("Conv2dReLU", "Attention", "Conv2dReLU", "Attention")
    ]


def test_an_export_loads_upstream_and_comes_back(tmp_path):
    model, state = eqzoo.create("unet_resnet18", num_classes=2, widths=WIDTHS, key=jax.random.key(0))
    eqzoo.export(tmp_path / "model.pth", model, state, format="smp")
    Unet("resnet18").load_state_dict(torch.load(tmp_path / "model.pth"), strict=True)
    with pytest.raises(ValueError, match="smp has no folders"):
        eqzoo.export(tmp_path / "folder", model, state, format="smp")
    headless, _ = eqzoo.create("unet_resnet18", num_classes=0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="smp has no UNet with num_classes=0"):
        eqzoo.export(tmp_path / "headless.pth", headless, state, format="smp")


def test_a_file_of_the_librarys_loads_with_another_head(tmp_path):
    upstream = randomise(smp.Unet("resnet18", encoder_weights=None), 0)
    torch.save(upstream.state_dict(), tmp_path / "model.pth")
    model, _ = eqzoo.load(tmp_path / "model.pth", name="unet_resnet18", num_classes=3, trainable=True)
    assert model.head.weight.shape == (3, 16, 3, 3)
    assert_close(model.backbone.stem.conv.conv.weight, upstream.encoder.conv1.weight, 0.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"widths": (16, 8)},
            r"widths=\(16, 8\) double the smallest map 2 times, but 'resnet18' has maps at 1/2, 1/4,",
        ),
        ({"backbone": "alexnet"}, "choose a backbone whose maps halve, such as 'resnet34'"),
        ({"backbone": "vit_tiny_patch16_224"}, "ViT gives tokens, not maps"),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        eqzoo.create("unet_resnet18", **options, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("backbone", "skips"),
    [
        ("resnet18", [3, 2, 1, 0, None]),
        ("swin_t", [2, 1, 0, None, None]),
        ("timm/vgg11", [4, 3, 2, 1, None]),  # whose first map, of the image's size, is not used
    ],
)
def test_each_step_takes_the_map_of_its_size(backbone, skips):
    model, _ = _skeleton(partial(UNet, UNetConfig(backbone=backbone)))
    assert [index for _, index in model.skips] == skips


def test_weights_start_as_the_librarys():
    """Decoder: uniform by the number of inputs, for ReLU. Head: by inputs and outputs. Biases zero."""
    model, _ = eqzoo.create("unet_resnet18", num_classes=40, key=jax.random.key(0))
    conv = model.blocks[0].conv1.conv.weight
    assert_close(jnp.abs(conv).max(), np.sqrt(6 / (768 * 9)), 1e-3)
    assert_close(jnp.abs(model.head.weight).max(), np.sqrt(6 / (56 * 9)), 1e-2)
    assert not model.head.bias.any()
