"""What decays, and what learns at which rate, is what it is in timm."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
import timm
import torch
from jaxtyping import PyTree
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from eqzoo._model import _skeleton
from eqzoo._registry import families
from eqzoo.checkpoint import unfill
from eqzoo.tree import decay_mask, layer_scales, map_with_path
from tests.parity import structure

# One variant of each structure, but of VGG, the rules of which take real shapes.
TIMM = {
    (family.model.__name__, structure(family.variants[name])): (family, name, upstream.rules)
    for family in families()
    for naming, upstream in family.upstreams.items()
    if naming.startswith("timm") and family.model.__name__ != "VGG"
    for name in filter(upstream.has, family.variants)
}

# Where timm's layers are others than blocks and what comes before and after them: ConvNeXt's last norm is in the head,
# EVA's frequencies too, and in these three any module may be a layer.
OTHER_LAYERS = {
    "ConvNeXt": r"(head\.norm|norm_pre)\..*",
    "Eva": r"rope\.freqs",
    "MobileNet": r".*",
    "DenseNet": r".*",
    "InceptionV3": r".*",
}
AFFINE = re.compile(
    r".*\.(alpha|beta)"
)  # ResMLP's scales and biases, which decay in timm for they have three axes there


def by_upstream_name(skeleton: PyTree, values: PyTree, rules: Any) -> dict[str, Any]:
    """The one value that a tree has for all numbers of each upstream tensor."""

    def stand_in(leaf, layers, value):
        return np.broadcast_to(value, leaf.shape[:layers] + (1,) * (len(leaf.shape) - layers))

    layers = map_with_path(lambda path, leaf: path.count("[*]"), skeleton)
    small = jax.tree.map(stand_in, skeleton, layers, values)  # an axis of length one for each axis within a layer
    found = {name: np.unique(tensor) for name, tensor in unfill(small, rules).items()}
    assert all(value.size == 1 for value in found.values())
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize(("family", "name", "rules"), TIMM.values(), ids=[name for _, name, _ in TIMM.values()])
def test_decay_and_layer_scales_of_a_variant_are_timms(family, name, rules):
    model, _ = _skeleton(functools.partial(family.model, family.variants[name]))
    skeleton = eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    with torch.device("meta"):
        upstream = timm.create_model(name.removeprefix("timm/"))
    parameters = dict(upstream.named_parameters())
    excluded = upstream.no_weight_decay() if hasattr(upstream, "no_weight_decay") else ()

    # One number says both: a scale whose sign is that of a leaf that decays.
    mask, scales = decay_mask(skeleton), layer_scales(skeleton, 0.7)
    signed = jax.tree.map(lambda decays, scale: scale if decays else -scale, mask, scales)
    ours = by_upstream_name(skeleton, signed, rules)
    assert ours.keys() == parameters.keys()

    groups = param_groups_weight_decay(upstream, 0.05, no_weight_decay_list=excluded)
    decay = {id(parameter): group["weight_decay"] > 0 for group in groups for parameter in group["params"]}
    expected = {key: decay[id(p)] and not AFFINE.fullmatch(key) for key, p in parameters.items()}
    assert {key: number > 0 for key, number in ours.items()} == expected
    count = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(skeleton, mask)))
    assert count == sum(parameters[key].numel() for key, decays in expected.items() if decays)

    groups = param_groups_layer_decay(upstream, no_weight_decay_list=excluded, layer_decay=0.7)
    theirs = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    for key, parameter in parameters.items():
        if not re.fullmatch(OTHER_LAYERS.get(family.model.__name__, ""), key):
            assert abs(ours[key]) == pytest.approx(theirs[id(parameter)], rel=1e-6), key
