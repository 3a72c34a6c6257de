"""Conv2d is torch's and timm's, its primitives compose with every transformation, and the CPU's forms are `lax`'s."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eqzoo.nn import _conv_cpu
from eqzoo.nn import _conv_primitives as primitives
from eqzoo.nn._conv_geometry import Geometry
from eqzoo.nn._conv_primitives import conv, conv_dw, conv_dx
from eqzoo.nn.conv import Conv2d, conv2d

# dense, dense with many inputs, with many channels (Winograd's), grouped, grouped with merged groups left over, two
# groups of many channels, depthwise, depthwise with multiplier 2, 1x1, grouped 1x1
CHANNELS = {
    "dense": (3, 5, 1),
    "deep": (8, 5, 1),
    "many": (64, 65, 1),
    "groups2": (4, 6, 2),
    "groups4": (32, 24, 4),
    "wide": (132, 6, 3),
    "groups-of-many": (128, 128, 2),
    "depthwise": (6, 6, 6),
    "x2": (4, 8, 4),
    "product": (3, 5, 1),
    "products2": (4, 6, 2),
}
KERNELS = {"product": (1, 1), "products2": (1, 1), "many": (3, 3), "groups-of-many": (3, 3)}
GEOMETRIES = {
    "plain": {},
    "stride2": {"stride": (2, 2), "padding": ((1, 1), (1, 1))},
    "stride3": {"stride": (3, 2), "padding": ((2, 0), (0, 3))},
    "dilated": {"dilation": (2, 1), "padding": ((2, 1), (0, 1))},
    "dilated-strided": {"dilation": (2, 2), "stride": (2, 3), "padding": ((1, 2), (2, 1))},
    "crop": {"padding": ((1, -2), (-1, 2)), "stride": (1, 2)},
    "crop-odd": {"padding": ((-1, 2), (0, -1))},
    "wide-padding": {"padding": ((4, 4), (5, 3))},
    "stride-over-kernel": {"stride": (4, 5)},
}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.max(np.abs(a - b), initial=0) <= tolerance * max(np.max(np.abs(b), initial=0), 1e-30)


def operands(channels, dtype=jnp.float32, n=2, **options):
    i, o, groups = CHANNELS[channels]
    kernel = KERNELS.get(channels, (3, 2))
    geometry = Geometry((9, 8), kernel, groups=groups, **options)
    x, w = normal(0, n, 9, 8, i, dtype=dtype), normal(1, o, i // groups, *kernel, dtype=dtype)
    return x, w, normal(2, n, *geometry.out_size, o, dtype=dtype), geometry


def all_three(x, w, y, geometry, prefix):
    functions = (getattr(primitives, prefix + name) for name in ("conv", "conv_dx", "conv_dw"))
    return [f(*pair, geometry=geometry) for f, pair in zip(functions, ((x, w), (y, w), (x, y)), strict=True)]


FORMS = [
    *((channels, options) for channels in ("dense", "deep", "groups2", "depthwise") for options in GEOMETRIES),
    *((channels, options) for channels in ("groups4", "wide", "x2") for options in ("stride2", "crop")),
    *(("many", options) for options in ("plain", "stride2", "crop-odd", "wide-padding")),
    ("groups-of-many", "plain"),
    *(("product", options) for options in ("plain", "stride2", "dilated", "crop")),
    ("products2", "plain"),
]


@pytest.mark.parametrize(("channels", "options"), FORMS)
def test_cpu_forms_equal_lax(channels, options):
    x, w, y, geometry = operands(channels, **GEOMETRIES[options])

    @jax.jit
    def both(x, w, y):
        return all_three(x, w, y, geometry, "cpu_"), all_three(x, w, y, geometry, "lax_")

    assert_close(*both(x, w, y))


@pytest.mark.parametrize("channels", ["deep", "many"])
def test_cropped_on_one_side_and_padded_on_the_other(channels):
    """Which `lax` gets wrong on the CPU."""
    x, w, y, geometry = operands(channels, n=8, padding=((-2, 1), (0, -1)))
    cropped = Geometry((7, 7), geometry.kernel, padding=((0, 1), (0, 0)))
    assert_close(conv(x, w, geometry), conv(x[:, 2:, :-1], w, cropped))
    assert_close(conv_dx(y, w, geometry)[:, 2:, :-1], conv_dx(y, w, cropped))
    assert_close(conv_dw(x, y, geometry), conv_dw(x[:, 2:, :-1], y, cropped))


@pytest.mark.parametrize("images", [33, 70])
@pytest.mark.parametrize("options", GEOMETRIES)
def test_images_side_by_side_in_parts_equal_lax(options, images, monkeypatch):
    monkeypatch.setattr(_conv_cpu, "CACHE", 2000)
    x, w, y, geometry = operands("deep", n=images, **GEOMETRIES[options])
    functions = [
        jax.jit(lambda *arrays, prefix=prefix: all_three(*arrays, geometry, prefix)) for prefix in ("cpu_", "lax_")
    ]
    assert_close(functions[0](x, w, y), functions[1](x, w, y))


def test_many_groups_are_a_loop_over_some_of_them():
    geometry = Geometry((5, 5), (3, 3), padding=((1, 1), (1, 1)), groups=18)
    x, w, y = normal(0, 2, 5, 5, 18 * 20), normal(1, 18 * 20, 20, 3, 3), normal(2, 2, 5, 5, 18 * 20)
    program = str(jax.make_jaxpr(lambda x, w: primitives.cpu_conv(x, w, geometry=geometry))(x, w))
    assert "length=2" in program
    assert program.count("conv_general_dilated") == 9
    got, want = (
        jax.jit(lambda *a, prefix=prefix: all_three(*a, geometry, prefix))(x, w, y) for prefix in ("cpu_", "lax_")
    )
    assert_close(got, want)


def test_many_channels_take_16_products_for_36():
    x, w, y, geometry = operands("many")
    programs = [
        str(jax.make_jaxpr(lambda *pair, f=f: f(*pair, geometry=geometry))(*pair))
        for f, pair in (
            (primitives.cpu_conv, (x, w)),
            (primitives.cpu_conv_dx, (y, w)),
            (primitives.cpu_conv_dw, (x, y)),
        )
    ]
    assert [program.count("= dot_general") for program in programs] == [16, 16, 16]
    assert "conv_general_dilated" not in "".join(programs)


KINDS = [
    ("dense", "stride2"),
    ("deep", "stride2"),
    ("many", "plain"),
    ("groups2", "stride2"),
    ("depthwise", "stride2"),
    ("product", "plain"),
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
@pytest.mark.parametrize(("channels", "options"), KINDS)
def test_dtypes(channels, options, dtype):
    """Half precision stays within its rounding of float32, float64 within its own."""
    with jax.enable_x64(True):
        x, w, y, geometry = operands(channels, dtype, **GEOMETRIES[options])
        got = all_three(x, w, y, geometry, "")
        assert {a.dtype for a in got} == {jnp.dtype(dtype)}
        wide = all_three(*(a.astype(jnp.float64) for a in (x, w, y)), geometry, "lax_")
        tolerance = {jnp.bfloat16: 1e-2, jnp.float16: 2e-3, jnp.float64: 1e-12}[dtype]
        assert_close([a.astype(jnp.float64) for a in got], wide, tolerance)


def test_bfloat16_depthwise_accumulates_in_float32():
    x = jnp.full((1, 16, 16, 2), 1, jnp.bfloat16).at[:, 0, 0].set(256)
    geometry = Geometry((16, 16), (16, 16), groups=2)
    w = jnp.ones((2, 1, 16, 16), jnp.bfloat16)
    assert conv(x, w, geometry)[0, 0, 0, 0] == jnp.bfloat16(256 + 255)
    geometry = Geometry((16, 16), (1, 1), groups=2)
    assert conv_dw(x, jnp.ones_like(x), geometry)[0, 0, 0, 0] == jnp.bfloat16(256 + 255)


BATCHES = [(0, None), (None, 0), (0, 0), (1, 2)]


@pytest.mark.parametrize("axes", BATCHES)
@pytest.mark.parametrize(("channels", "options"), [*KINDS, ("x2", "stride2")])
def test_every_batch_of_every_primitive_is_a_loop(channels, options, axes):
    x, w, y, geometry = operands(channels, **GEOMETRIES[options])

    @jax.jit
    def check(x, w, y):
        results = []
        for f, pair in ((conv, (x, w)), (conv_dx, (y, w)), (conv_dw, (x, y))):
            batch = [
                a if axis is None else jnp.stack([a, 2 * jnp.flip(a), a**2], axis)
                for a, axis in zip(pair, axes, strict=True)
            ]
            lax_f = getattr(primitives, "lax_" + f.__name__)
            one = [
                [a if axis is None else jnp.take(a, b, axis) for a, axis in zip(batch, axes, strict=True)]
                for b in range(3)
            ]
            want = jnp.stack([lax_f(*pair, geometry=geometry) for pair in one])
            results.append((jax.vmap(lambda a, b, f=f: f(a, b, geometry), axes)(*batch), want))
        return results

    for got, want in check(x, w, y):
        assert_close(got, want)


@pytest.mark.parametrize(
    ("channels", "options"),
    [(channels, options if options == "plain" else "dilated-strided") for channels, options in KINDS],
)
def test_transformations_equal_lax(channels, options):
    """First and second derivatives of each primitive in each argument, forward and reverse, batched in every way.

    In float64, because chains of nonlinear layers amplify float32's rounding.
    """
    with jax.enable_x64(True):
        x, w, y, geometry = operands(channels, jnp.float64, **GEOMETRIES[options])
        check_transformations(x, w / math.sqrt(w[0].size), y / math.sqrt(y[..., 0].size), geometry)


def check_transformations(x, w, y, geometry):

    def transformed(f, a, b):
        def loss(a, b):
            return jnp.sum(jnp.sin(f(a, b)))

        grad, many_a, many_b = jax.grad(loss, (0, 1)), jnp.stack([a, 2 * a, a * a]), jnp.stack([b, b * b, -b])
        few = (jnp.arange(2.0), jnp.ones(2))

        def in_few(s, t):
            return f(a * (1 + s[0] + s[1] ** 2 * a), b * (1 + t[0] * b - t[1] ** 2))

        layers = (lambda c, b: (c + jax.grad(loss)(c, b), None), many_b)
        return {
            "grad": grad(a, b),
            "jvp": jax.jvp(f, (a, b), (a**2, b**2)),
            "hvp": jax.jvp(grad, (a, b), (jnp.cos(a), jnp.cos(b))),
            "grad of grad": jax.grad(lambda a, b: sum(jnp.sum(g**3) for g in grad(a, b)), (0, 1))(a, b),
            "jacfwd": jax.jacfwd(in_few, (0, 1))(*few),
            "per-example grad": jax.vmap(grad, (0, None))(many_a, b),
            "ensemble grad": jax.vmap(grad, (None, 0))(a, many_b),
            "both": jax.vmap(grad)(many_a, many_b),
            "vmap of vmap": jax.vmap(jax.vmap(grad, (None, 0)), (0, None))(many_a, many_b),
            "grad of vmap": jax.grad(lambda a, b: jnp.sum(jax.vmap(loss, (0, None))(a, b)), (0, 1))(many_a, b),
            "scan": jax.lax.scan(layers[0], a, layers[1])[0],
            "remat": jax.grad(jax.checkpoint(loss), (0, 1))(a, b),
        }

    cases = {"conv": (x, w), "conv_dx": (y, w), "conv_dw": (x, y)}
    for name, (a, b) in cases.items():
        ours, theirs = getattr(primitives, name), getattr(primitives, "lax_" + name)
        got = jax.jit(lambda a, b, f=ours: transformed(lambda a, b: f(a, b, geometry), a, b))(a, b)
        want = jax.jit(lambda a, b, f=theirs: transformed(lambda a, b: f(a, b, geometry=geometry), a, b))(a, b)
        for key in want:
            assert_close(got[key], want[key], 1e-11)


@pytest.mark.parametrize("channels", CHANNELS)
def test_empty_batches(channels):
    x, w, _, geometry = operands(channels, n=0)
    assert conv(x, w, geometry).shape[0] == 0

    def loss(w, x):
        return jnp.sum(conv(x, w, geometry) ** 2)

    assert_close(jax.grad(loss)(w, x), jnp.zeros_like(w))
    per_example = jax.vmap(jax.grad(loss), (None, 0))(w, x[:, None])
    assert per_example.shape == (0, *w.shape)


@pytest.mark.parametrize("number", [jnp.inf, jnp.nan])
def test_depthwise_with_numbers_that_are_not_finite(number):
    x, w, y, geometry = operands("depthwise")
    x, w, y = (array.at[0, 0, 0, 0].set(number) for array in (x, w, y))
    for got, want in zip(all_three(x, w, y, geometry, ""), all_three(x, w, y, geometry, "lax_"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", range(3), ids=["conv", "conv_dx", "conv_dw"])
def test_xla_computes_depthwise_convolutions_once(form):
    """In a call of their own; what XLA inlines, it may fuse with all that uses it."""
    x, w, y, geometry = operands("depthwise")
    program = jax.jit(lambda x, w, y: all_three(x, w, y, geometry, "")[form]).lower(x, w, y).compile().as_text()
    assert " call(" in program


def test_eager_and_jit_agree():
    x, w, y, geometry = operands("groups2")
    assert_close(all_three(x, w, y, geometry, ""), jax.jit(lambda *a: all_three(*a, geometry, ""))(x, w, y))


@pytest.mark.parametrize("channels", ["dense", "groups2", "depthwise", "product"])
def test_sharded_over_the_batch(channels):
    x, w, _, geometry = operands(channels, n=8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def value_and_grads(x, w):
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(conv(x, w, geometry))), (0, 1))(x, w)

    sharded = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(w, NamedSharding(mesh, P()))
    got = jax.jit(value_and_grads)(*sharded)
    assert got[1][0].sharding.spec[0] == "data"
    assert_close(got, jax.jit(value_and_grads)(x, w))


@pytest.mark.parametrize("channels", ["dense", "groups2", "depthwise", "product"])
def test_export_for_two_platforms_runs_here(channels):
    x, w, y, geometry = operands(channels)
    function = jax.jit(lambda x, w, y: all_three(x, w, y, geometry, ""))
    exported = jax.export.export(function, platforms=("cpu", "cuda"))(x, w, y)
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(x, w, y), function(x, w, y))


def test_primitives_say_what_does_not_fit():
    x, w, y, geometry = operands("groups2")
    with pytest.raises(ValueError, match=r"one dtype, got .*bfloat16"):
        primitives.conv_p.bind(x, w.astype(jnp.bfloat16), geometry=geometry)
    with pytest.raises(ValueError, match=r"x has 4 channels, but w .* expects 6"):
        primitives.conv_p.bind(x, normal(0, 6, 3, 3, 2), geometry=geometry)
    with pytest.raises(ValueError, match=r"y has 4 channels, but w .* expects 6"):
        primitives.conv_dx_p.bind(y[..., :4], w, geometry=geometry)
    with pytest.raises(ValueError, match="x holds 2 images, but y holds 1"):
        primitives.conv_dw_p.bind(x, y[:1], geometry=geometry)
    with pytest.raises(ValueError, match="multiple of 2 channels"):
        primitives.conv_dw_p.bind(x[..., :3], y, geometry=geometry)


LAYERS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=(3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
    dict(kernel_size=3, stride=2, padding=1, groups=4),
    dict(kernel_size=5, padding=2, groups=8),
    dict(kernel_size=1),
    dict(kernel_size=1, stride=(2, 3), use_bias=False),
    dict(kernel_size=1, padding=1),
    dict(kernel_size=(4, 2), stride=(4, 2)),
    dict(kernel_size=2, stride=2, groups=2),
    dict(kernel_size=(4, 3), padding="same", dilation=(1, 2)),
    dict(kernel_size=3, stride=2, padding="same_tf"),
    dict(kernel_size=(5, 2), stride=(2, 3), padding="same_tf", groups=8),
    dict(kernel_size=2, stride=3, padding="same_tf"),
]


# torch pads a copy there, and says so.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("ins", "outs", "layer"), [*((8, 16, layer) for layer in LAYERS), (64, 65, dict(kernel_size=3, padding=1))], ids=str
)
def test_layer_and_gradients_equal_upstream(ins, outs, layer):
    import torch
    from timm.layers.conv2d_same import conv2d_same

    conv = Conv2d(ins, outs, **layer, key=jax.random.key(0))
    image, cotangent = normal(3, 11, 10, ins), None
    tensors = [torch.tensor(np.asarray(a), requires_grad=True) for a in (image, conv.weight)]
    bias = None if conv.bias is None else torch.tensor(np.asarray(conv.bias), requires_grad=True)
    options = (conv.stride, 0 if conv.padding == "same_tf" else conv.padding, conv.dilation, conv.groups)
    upstream = conv2d_same if conv.padding == "same_tf" else torch.nn.functional.conv2d
    want = upstream(tensors[0].permute(2, 0, 1)[None], tensors[1], bias, *options)[0].permute(1, 2, 0)

    got, pullback = jax.vjp(lambda conv, x: conv(x), conv, image)
    assert_close(got, jnp.asarray(want.detach().numpy()))
    cotangent = normal(4, *got.shape)
    want.backward(torch.tensor(np.asarray(cotangent)))
    layer_grad, image_grad = pullback(cotangent)
    assert_close(image_grad, jnp.asarray(tensors[0].grad.numpy()))
    assert_close(layer_grad.weight, jnp.asarray(tensors[1].grad.numpy()))
    if bias is not None:
        assert_close(layer_grad.bias, jnp.asarray(bias.grad.numpy()))


@pytest.mark.parametrize("options", [{"kernel_size": 1, "stride": 2}, {"kernel_size": 2, "stride": 2}])
def test_weight_gradient_of_a_product_sums_over_one_axis(options):
    """Over images, rows and columns as one. As three, XLA:CPU takes up to ten times as long."""
    layer = Conv2d(3, 4, **options, key=jax.random.key(0))
    loss = lambda layer, x: jnp.sum(jax.vmap(layer)(x) ** 2)
    program = jax.jit(jax.grad(loss)).lower(layer, jnp.zeros((5, 6, 6, 3))).as_text()
    assert re.findall(r"contracting_dims = \[(.*?)\] x \[(.*?)\]", program) == [("1", "0")] * 2
    assert "convolution" not in program


def test_ensemble_of_layers():
    layers = eqx.filter_vmap(lambda key: Conv2d(4, 6, 3, groups=2, key=key))(jax.random.split(jax.random.key(0), 3))
    images = normal(0, 2, 7, 7, 4)
    got = eqx.filter_vmap(lambda layer: jax.vmap(layer)(images))(layers)
    for index in range(3):
        layer = jax.tree.map(lambda a, index=index: a[index], layers)
        assert_close(got[index], jnp.stack([layer(image) for image in images]))


def test_init_is_torchs_default():
    layer = Conv2d(64, 64, 3, groups=2, key=jax.random.key(0))
    bound = 1 / np.sqrt(32 * 9)
    for array in (layer.weight, layer.bias):
        assert 0.9 * bound < jnp.max(jnp.abs(array)) <= bound
        assert abs(jnp.std(array) - bound / np.sqrt(3)) < 0.15 * bound


def test_mixed_dtypes_promote_like_jnp():
    layer = Conv2d(3, 4, 3, key=jax.random.key(0))
    image = normal(0, 5, 5, 3)
    assert layer(image.astype(jnp.bfloat16)).dtype == jnp.float32
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)
    assert half(image).dtype == jnp.float32
    assert half(image.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_errors_say_what_to_do():
    layer = Conv2d(3, 4, 3, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"has 8 channels .* expects 3\. .*jnp\.moveaxis\(x, 0, -1\)"):
        layer(jnp.zeros((3, 8, 8)))
    with pytest.raises(ValueError, match=r"has 5 channels .* expects 3\.$"):
        layer(jnp.zeros((8, 8, 5)))
    with pytest.raises(ValueError, match="larger than the padded image"):
        layer(jnp.zeros((2, 8, 3)))
    with pytest.raises(ValueError, match="larger than the padded image"):
        Conv2d(3, 4, 4, stride=4, key=jax.random.key(0))(jnp.zeros((3, 8, 3)))
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="in_channels=3 is not a multiple of groups=2"):
        Conv2d(3, 4, 3, groups=2, key=key)
    with pytest.raises(ValueError, match="out_channels=3 is not a multiple of groups=2"):
        Conv2d(4, 3, 3, groups=2, key=key)
    with pytest.raises(ValueError, match=r'padding="same" needs stride 1, got stride=\(2, 2\); pass'):
        Conv2d(3, 4, 3, stride=2, padding="same", key=key)
    with pytest.raises(ValueError, match='padding="valid" is unknown; pass'):
        Conv2d(3, 4, 3, padding="valid", key=key)
    with pytest.raises(ValueError, match='padding="valid" is unknown; pass'):
        conv2d(jnp.zeros((8, 8, 3)), layer.weight, padding="valid")
