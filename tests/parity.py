"""Comparison with an upstream model: its weights through the checkpoint rules, then names, outputs and gradients."""

import copy
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from math import prod, sqrt
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, PyTree

import eqzoo
from eqzoo._load import match_tensors, read
from eqzoo._model import _maker, _merge, _skeleton
from eqzoo._registry import variant
from eqzoo._save import _stored
from eqzoo.checkpoint import CheckpointError, plan, unfill
from eqzoo.checkpoint.formats import Tensor
from eqzoo.models._family import Family

Rules = tuple[Any, ...]


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Draw every parameter and running statistic, in place, so large that each of them matters to the output.

    A matrix keeps the size of what it maps, so that attention is far from uniform and depth neither fades nor explodes;
    norms and layer scales lie around one, biases, tokens and positions around zero.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, tensor in module.named_parameters(recurse=False):
                tensor.copy_(_drawn(module, name, tensor, generator))
            for name, buffer in module.named_buffers(recurse=False):
                if name == "running_mean":
                    buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
                elif name == "running_var":
                    buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
                elif name == "num_batches_tracked":
                    buffer.fill_(7)
    return model


def _drawn(module: torch.nn.Module, name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.ndim < 2:
        return 0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise
    if not name.endswith("weight") or isinstance(module, torch.nn.Embedding):
        return 0.5 * noise
    fan_in = tensor.shape[0] if type(module).__name__ == "Conv1D" else prod(tensor.shape[1:])  # transformers' (in, out)
    return noise / sqrt(fan_in)


def from_torch(target: str | tuple[Family, Any], model: torch.nn.Module) -> tuple[Any, eqx.nn.State]:
    """The pair of model and state with the weights of `model`; `target` is a model's name, or a family and a config."""
    make, rules = _make_and_rules(target)
    tensors = {name: _stored(tensor.detach().numpy().copy()) for name, tensor in model.state_dict().items()}
    return filled(tensors, _skeleton(make), rules)


def filled(
    tensors: Mapping[str, Tensor], pair: tuple[Any, eqx.nn.State | None], namings: Mapping[str, Rules]
) -> tuple[Any, eqx.nn.State]:
    """The pair of model and state with a checkpoint's numbers; a `CheckpointError` tells how it does not fit."""
    match = match_tensors(tensors, pair, namings)
    if match.plan.problems:
        raise CheckpointError(match.plan.report("the checkpoint", "the model"))
    return read(tensors, match, [], None, None)


def _make_and_rules(target: str | tuple[Family, Any]) -> tuple[Any, Mapping[str, Rules]]:
    if isinstance(target, str):
        return _maker(target, {}), variant(target)[0].rules
    family, config = target
    return functools.partial(family.model, config), family.rules


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def mean_square(model: Any, state: eqx.nn.State, images: Array) -> tuple[Array, tuple[Array, eqx.nn.State]]:
    """A loss of the outputs for a batch; with it, the outputs and the new state."""
    forward = lambda image: eqzoo.apply(model, state, image)
    outputs, new_state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(images)
    return jnp.mean(outputs**2), (outputs, new_state)


def array(tensor: torch.Tensor) -> Array:
    return jnp.asarray(tensor.detach().numpy())


def assert_close(ours: Array | np.ndarray, theirs: torch.Tensor | np.ndarray, tolerance: float = 1e-5) -> None:
    """Of one shape, finite, and the largest error at most `tolerance` times the largest number of theirs."""
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else theirs
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    assert np.isfinite(theirs).all(), "upstream's own result is not finite"
    error, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    assert error <= tolerance * scale, f"relative error above {tolerance:.0e}: {error:.2e} on a scale of {scale:.2e}"


def assert_same_gradients(gradients: PyTree, model: torch.nn.Module, rules: Rules, tolerance: float = 1e-3) -> None:
    """A model-shaped tree of gradients against `.grad` of every trained parameter upstream, tensor by tensor.

    An error counts relative to its tensor's largest gradient; where that should vanish (a key's bias), rounding is
    allowed for at a thousandth of the model's largest.
    """
    ours = unfill(gradients, rules)
    theirs = {
        name: np.zeros(tuple(parameter.shape)) if parameter.grad is None else parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    assert largest > 0, "upstream has no gradients: call backward() first"
    for name, gradient in theirs.items():
        scale = max(np.abs(gradient).max(), 1e-3 * largest)
        error = np.abs(ours[name] - gradient).max() / scale
        assert error <= tolerance, f"{name}: relative error {error:.2e}, above {tolerance:.0e}"


def assert_same_results(
    target: str | tuple[Family, Any],
    upstream: torch.nn.Module,
    images: np.ndarray,
    rules: Rules,
    *,
    training: bool = False,
) -> None:
    """Outputs, the gradients of their mean square, and running statistics, for a batch of channels-last `images`.

    In training in double precision: batch norms over small maps enlarge rounding until a ReLU switches.
    """
    model, state = from_torch(target, upstream)
    model = model if training else eqx.nn.inference_mode(model)
    upstream.train(training)
    if training:
        upstream = copy.deepcopy(upstream).double()
        images = images.astype(np.float64)
    with jax.enable_x64(training):
        model, state = in_double_precision((model, state)) if training else (model, state)
        (_, (outputs, state)), gradients = mean_square(model, state, jnp.asarray(images))
    theirs = upstream(torch.tensor(images).permute(0, 3, 1, 2))
    theirs.square().mean().backward()
    assert_close(outputs, theirs, 1e-4)
    assert_same_gradients(gradients, upstream, rules)
    after = unfill(_merge(model, state), rules)
    for name, buffer in upstream.named_buffers():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert_close(after[name], buffer, 1e-5)


def in_double_precision(tree: PyTree) -> PyTree:
    """Within `jax.enable_x64`."""
    return jax.tree.map(lambda leaf: leaf.astype(np.float64) if eqx.is_inexact_array(leaf) else leaf, tree)


def assert_names_and_shapes(
    target: str | tuple[Family, Any], upstream: Mapping[str, torch.Tensor], *, unused: int | None = 0
) -> None:
    """A state dict (on torch's meta device) fits the model completely, and the model's export is that state dict.

    What the rules drop, and second names of one tensor, need no place in the model or its export; nor do as many
    numbers of the others as are `unused` (any, if None).
    """
    make, namings = _make_and_rules(target)
    skeleton = _merge(*_skeleton(make))
    shapes = {name: tuple(tensor.shape) for name, tensor in upstream.items()}
    tensors = {name: Tensor(shapes[name], _dtype(tensor), lambda: np.empty(0)) for name, tensor in upstream.items()}
    fits = {}
    for naming, rules in namings.items():
        fits[naming] = plan(skeleton, tensors, rules)
        if not fits[naming].problems:
            break
    naming = min(fits, key=lambda naming: fits[naming].problems)
    assert not fits[naming].problems, fits[naming].report("upstream's state dict", str(target))

    expected = {name: shapes[name] for name, _, _ in fits[naming].moves}
    exported = unfill(jax.tree.map(_zeros, skeleton), namings[naming])
    assert {name: array.shape for name, array in exported.items()} == expected
    count = sum(leaf.size for leaf in jax.tree.leaves(skeleton) if isinstance(leaf, jax.ShapeDtypeStruct))
    assert unused is None or count + unused == sum(prod(shape) for shape in expected.values())


def number_of_parameters(family: Family, config: Any) -> int:
    """Without running statistics, as torchvision counts."""
    model, _ = _skeleton(functools.partial(family.model, config))
    return sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))


def narrowed(conv: Callable[..., torch.nn.Module], divisor: int) -> Callable[..., torch.nn.Module]:
    """Upstream's convolution with a fraction of the channels, but for an image's: for models whose widths are fixed."""
    return lambda ins, outs, **options: conv(ins if ins == 3 else ins // divisor, outs // divisor, **options)


def _zeros(leaf: Any) -> Any:
    """An array of the leaf's shape that takes no memory."""
    return np.broadcast_to(np.zeros((), np.int8), leaf.shape) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _dtype(tensor: torch.Tensor) -> np.dtype:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


def structure(value: Any) -> Hashable:
    """A config without its numbers, but for whether there are none, one or more."""
    if is_dataclass(value):
        return tuple(structure(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return frozenset(map(structure, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return min(value, 2) if isinstance(value, int) else value > 0
    return value
