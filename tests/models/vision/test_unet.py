"""U-Net is that of segmentation_models_pytorch: names, shapes, outputs of every pixel, gradients, running statistics.

The library is no dependency, so most tests compare with its decoder written out here; where it is installed, with it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from torch.nn import functional

import eqzoo
from eqzoo._model import _skeleton
from eqzoo.checkpoint import prefixed
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


class ResNetEncoder(torchvision.models.ResNet):
    """The image, and a map of each size; no head."""

    def __init__(self, *layers, block=torchvision.models.resnet.BasicBlock):
        super().__init__(block, layers)
        del self.fc
        self.channels = [64, *(width * block.expansion for width in (64, 128, 256, 512))]

    def forward(self, x):
        maps = [x, self.relu(self.bn1(self.conv1(x)))]
        y = self.maxpool(maps[-1])
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            y = stage(y)
            maps.append(y)
        return maps


class TimmEncoder(torch.nn.Module):
    """The same of timm's models."""

    def __init__(self, name):
        super().__init__()
        self.model = timm.create_model(name, features_only=True)
        self.channels = self.model.feature_info.channels()

    def forward(self, x):
        return [x, *self.model(x)]


class QuarterEncoder(torch.nn.Module):
    """Of one without a map at half the image's size: a map without channels takes its place."""

    def __init__(self, name):
        super().__init__()
        self.model = timm.create_model(name, num_classes=0)
        self.channels = [0, *(each["num_chs"] for each in self.model.feature_info)]

    def forward(self, x):
        half = x.new_zeros(len(x), 0, x.shape[2] // 2, x.shape[3] // 2)
        return [x, half, *self.model.forward_intermediates(x, intermediates_only=True)]


def conv_relu(ins, outs):
    conv = torch.nn.Conv2d(ins, outs, 3, padding=1, bias=False)
    return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(outs), torch.nn.ReLU())


class Block(torch.nn.Module):
    def __init__(self, ins, outs):
        super().__init__()
        self.conv1, self.conv2 = conv_relu(ins, outs), conv_relu(outs, outs)


class Decoder(torch.nn.Module):
    def __init__(self, channels, widths):
        super().__init__()
        skips = [*channels[-2::-1], 0]
        ins = [channels[-1], *widths[:-1]]
        self.blocks = torch.nn.ModuleList(
            Block(before + skip, width) for before, skip, width in zip(ins, skips, widths, strict=True)
        )

    def forward(self, maps):
        image, *maps, y = maps
        for block, skip in zip(self.blocks, [*maps[::-1], image], strict=True):
            y = functional.interpolate(y, size=skip.shape[2:], mode="nearest")
            y = block.conv2(block.conv1(y if skip is image else torch.cat([y, skip], dim=1)))
        return y


class Model(torch.nn.Module):
    def __init__(self, encoder, widths=WIDTHS, classes=2):
        super().__init__()
        self.encoder = encoder
        self.decoder = Decoder(encoder.channels, widths)
        self.segmentation_head = torch.nn.Sequential(torch.nn.Conv2d(widths[-1], classes, 3, padding=1))

    def forward(self, x):
        """Channels last, as the comparison wants it."""
        return self.segmentation_head(self.decoder(self.encoder(x))).permute(0, 2, 3, 1)


# A ResNet of smp's; one of timm's with a deep stem; one that has a map at half the image's size of itself; one without.
PAIRS = {
    "resnet18": (partial(ResNetEncoder, 2, 2, 2, 2), SMP),
    "resnet10t": (partial(TimmEncoder, "resnet10t"), SMP_TIMM_RESNET),
    "test_efficientnet": (partial(TimmEncoder, "test_efficientnet"), SMP_TIMM_MOBILENET),
    "test_convnext": (
        partial(QuarterEncoder, "test_convnext"),
        (*prefixed(r"encoder\.model\.", "backbone.", convnext.TIMM), *DECODER),
    ),
}


@pytest.mark.parametrize("backbone", PAIRS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics(backbone, training):
    encoder, rules = PAIRS[backbone]
    upstream = randomise(Model(encoder()), 0)
    family = FAMILY._replace(upstreams={"smp": Upstream(rules)})
    images = np.random.default_rng(1).normal(size=(4, 71, 62, 3)).astype(np.float32)
    config = UNetConfig(backbone=backbone, widths=WIDTHS, num_classes=2)
    assert_same_results((family, config), upstream, images, rules, training=training)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_same_names_and_shapes_as_the_library(name):
    smp = pytest.importorskip("segmentation_models_pytorch")
    backbone = VARIANTS[name].backbone
    with torch.device("meta"):
        encoder = backbone if backbone.startswith("resne") else f"tu-{backbone}"
        upstream = smp.Unet(encoder, encoder_weights=None)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    assert [type(module).__name__ for module in upstream.decoder.blocks[0].children()] == [
        *("Conv2dReLU", "Attention", "Conv2dReLU", "Attention")
    ]


@pytest.mark.parametrize("encoder", ["resnet18", "tu-resnet10t", "tu-test_efficientnet"])
def test_the_decoder_written_out_here_is_the_librarys(encoder):
    """Its names, and its outputs for an image of odd sizes."""
    smp = pytest.importorskip("segmentation_models_pytorch")
    theirs = smp.Unet(encoder, encoder_weights=None, decoder_channels=WIDTHS, classes=2)
    make, _ = PAIRS[encoder.removeprefix("tu-")]
    ours = Model(make())
    ours.load_state_dict(randomise(theirs, 0).state_dict(), strict=True)
    image = torch.randn(1, 3, 71, 62)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(image), theirs.eval()(image).permute(0, 2, 3, 1))


def test_an_export_loads_upstream_and_comes_back(tmp_path):
    model, state = eqzoo.create("unet_resnet18", num_classes=2, widths=WIDTHS, key=jax.random.key(0))
    eqzoo.export(tmp_path / "model.pth", model, state, format="smp")
    Model(ResNetEncoder(2, 2, 2, 2)).load_state_dict(torch.load(tmp_path / "model.pth"), strict=True)
    with pytest.raises(ValueError, match="smp has no folders"):
        eqzoo.export(tmp_path / "folder", model, state, format="smp")
    headless, _ = eqzoo.create("unet_resnet18", num_classes=0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="smp has no UNet with num_classes=0"):
        eqzoo.export(tmp_path / "headless.pth", headless, state, format="smp")


def test_a_file_of_the_librarys_loads_with_another_head(tmp_path):
    upstream = randomise(Model(ResNetEncoder(2, 2, 2, 2), (256, 128, 64, 32, 16), 1), 0)
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
