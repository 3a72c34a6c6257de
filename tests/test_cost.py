"""The cost of a model is torch's count of the same model, and the figures that torchvision publishes."""

import jax
import jax.numpy as jnp
import pytest
import timm
import torch
import torchvision
import transformers
from jax import lax
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import eqzoo
from eqzoo import nn
from eqzoo._cost import Cost, cost
from eqzoo._model import _maker, _skeleton

TOKENS = 16

UPSTREAM = {
    "resnet18": torchvision.models.resnet18,
    "resnet50": torchvision.models.resnet50,
    "resnext50_32x4d": torchvision.models.resnext50_32x4d,
    "seresnext26t_32x4d": lambda: timm.create_model("seresnext26t_32x4d"),
    "vit_b_32": torchvision.models.vit_b_32,
    "vit_base_patch16_reg4_gap_256": lambda: timm.create_model("vit_base_patch16_reg4_gap_256"),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="eager")),
}


class OutputSizes(TorchDispatchMode):
    """Counts the elements put out by torch's matrix products and convolutions."""

    PRODUCTS = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm)

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.PRODUCTS:
            self.total += out.numel()
        return out


def frozen(name):
    return eqzoo.freeze(*_skeleton(_maker(name, {})))


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("name", UPSTREAM)
def test_flops_and_activations_are_torchs_exactly(name):
    size = int(name[-3:]) if name.endswith("256") else 224
    if name == "gpt2":
        ours = cost(frozen(name), shaped(TOKENS, dtype=jnp.int32))
        x = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    else:
        ours = cost(frozen(name), shaped(size, size, 3))
        x = torch.zeros(1, 3, size, size, device="meta")
    with torch.device("meta"):
        theirs = UPSTREAM[name]().eval()
    outputs = OutputSizes()
    # torch counts no fused attention; as plain matrix products it counts it like any other
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, outputs:
        theirs(x)
    assert (ours.flops, ours.activations) == (flops.get_total_flops(), outputs.total)


def published():
    """The operations that torchvision states for each of its models at 224 pixels."""
    for name in torchvision.models.list_models():
        if name in eqzoo.list_models():
            for weights in torchvision.models.get_model_weights(name):
                if getattr(weights.transforms(), "crop_size", None) == [224]:
                    yield pytest.param(name, weights.meta["_ops"], id=str(weights))


@pytest.mark.parametrize(("name", "billions"), list(published()))
def test_multiply_adds_are_those_torchvision_publishes(name, billions):
    assert cost(frozen(name), shaped(224, 224, 3)).macs / 1e9 == pytest.approx(billions, abs=6e-4)


A, B = shaped(3, 4), shaped(4, 5)
ONE = Cost(macs=3 * 4 * 5, activations=3 * 5)


def scanned(a, b):
    return lax.scan(lambda carry, _: (carry, a @ b), 0, length=7)


@jax.custom_jvp
def nonlinear(a, b):
    return jnp.tanh(a @ b)


nonlinear.defjvps(None, None)

PROGRAMS = {
    "plain": (lambda a, b: jnp.tanh(a + 1) @ b, 1),
    "jit": (jax.jit(jnp.matmul), 1),
    "checkpoint": (jax.checkpoint(jnp.matmul), 1),
    "custom_jvp": (nonlinear, 1),
    "shared": (lambda a, b: jax.vmap(lambda _: a @ b, axis_size=6)(jnp.arange(6)), 1),
    "vmap": (lambda a, b: jax.vmap(lambda s: (s * a) @ b)(jnp.arange(6.0)), 6),
    "scan": (scanned, 7),
    "nested_scan": (lambda a, b: lax.map(lambda _: scanned(a, b), jnp.arange(2)), 14),
    "fori": (lambda a, b: lax.fori_loop(0, 5, lambda _, a: (a @ b)[:, :4], a), 5),
    "cond": (lambda a, b: lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: (a @ b) + (2 * a @ b)), 2),
    "platform": (lambda a, b: lax.platform_dependent(cpu=lambda: (2 * a) @ b @ b.T @ b, default=lambda: a @ b), 1),
    "while": (lambda a, b: lax.while_loop(lambda x: x < 3, lambda x: 2 * x, a[0, 0]) + a @ b, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_count_as_often_as_they_run(name):
    function, times = PROGRAMS[name]
    assert cost(function, A, B) == (times * ONE.macs, times * ONE.activations)


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match=r"an unknown number of turns; use `lax.scan`"):
        cost(lambda a: lax.while_loop(lambda a: a[0, 0] < 3, lambda a: a @ a, a), shaped(3, 3))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_costs_what_torch_counts_and_its_gradient_twice_that_more(groups, stride):
    """torch's own count of the gradient takes grouped weights for dense ones."""
    conv = torch.nn.Conv2d(4, 8, 3, stride=stride, padding=1, groups=groups, bias=False)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        conv(torch.zeros(2, 4, 9, 7))

    def loss(x, w):
        return jax.vmap(lambda x: nn.conv2d(x, w, stride=stride, padding=1, groups=groups))(x).sum()

    arrays = shaped(2, 9, 7, 4), shaped(8, 4 // groups, 3, 3)
    assert cost(loss, *arrays).flops == flops.get_total_flops()
    assert cost(jax.value_and_grad(loss, argnums=(0, 1)), *arrays).flops == 3 * flops.get_total_flops()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_laxs_own_convolutions_count_as_torchs(groups, transposed):
    make = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    with FlopCounterMode(display=False) as flops:
        make(4, 8, 3, stride=2, padding=1, groups=groups, bias=False)(torch.zeros(1, 4, 9, 7))

    def conv(x, w):
        geometry = {"window_strides": (1, 1), "lhs_dilation": (2, 2)} if transposed else {"window_strides": (2, 2)}
        return lax.conv_general_dilated(x, w, padding=[(1, 1), (1, 1)], feature_group_count=groups, **geometry)

    assert cost(conv, shaped(1, 4, 9, 7), shaped(8, 4 // groups, 3, 3)).flops == flops.get_total_flops()


def test_an_unused_result_of_any_kind_is_no_obstacle():
    assert cost(lambda a: (a @ a, None, "text", {"state": a}), shaped(2, 2)).macs == 8
