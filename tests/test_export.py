"""What `export` writes loads strictly in timm and torchvision, computes the same there, and comes back unchanged."""

import json
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision

import eqzoo
import eqzoo._save
from eqzoo import CheckpointError
from eqzoo._model import _merge, _skeleton, _split
from eqzoo._registry import families
from eqzoo.models.vision.mlp import MLPConfig
from eqzoo.models.vision.resnet import ResNetConfig
from eqzoo.models.vision.vit import ViTConfig
from eqzoo.tree import map_with_path
from tests.parity import assert_close

VIT = {"dim": 24, "depth": 2, "heads": 3, "patch_size": 8, "image_size": 32, "num_classes": 5}
GAP = {"class_token": False, "prefix_positions": False, "pool": "avg", "fc_norm": True}
RESNET = {"block": "basic", "depths": (1, 1, 2, 1), "widths": (8, 8, 16, 16), "num_classes": 5}
BOTTLENECK = {**RESNET, "block": "bottleneck"}
TIERED = {"stem": "tiered", "stem_width": 8, "shortcut": "pool"}

CONFIGS = {
    "vit": ViTConfig(**VIT),
    "vit, averaged": ViTConfig(**VIT, pool="avg"),
    "vit, averaged and normalised": ViTConfig(**VIT, pool="avg", fc_norm=True),
    "vit, normalised token": ViTConfig(**VIT, fc_norm=True),
    "vit of one channel": ViTConfig(**VIT, in_channels=1, mlp_ratio=2.6),
    "vit without head": ViTConfig(**{**VIT, "num_classes": 0}),
    "vit, other norms": ViTConfig(**VIT, norm_eps=1e-5, qk_norm=True, qkv_bias=False, activation="gelu_tanh"),
    "clip": ViTConfig(**VIT, norm_eps=1e-5, pre_norm=True, activation="quick_gelu"),
    "distilled": ViTConfig(**VIT, distilled=True),
    "distilled, of a size that only others have": ViTConfig(
        dim=768, depth=1, heads=12, patch_size=32, image_size=64, distilled=True
    ),
    "deit3": ViTConfig(**VIT, prefix_positions=False, layer_scale=1e-6),
    "deit3 without layer scale": ViTConfig(
        dim=384, depth=1, heads=6, image_size=32, num_classes=5, prefix_positions=False
    ),
    "registers": ViTConfig(**VIT, registers=2, layer_scale=1e-5, **GAP),
    "registers with positions": ViTConfig(**VIT, registers=2),
    "dinov2": ViTConfig(**{**VIT, "patch_size": 14, "image_size": 56, "num_classes": 0}, layer_scale=1e-5),
    "resnet": ResNetConfig(**RESNET),
    "resnet d": ResNetConfig(**RESNET, stem="deep", stem_width=8, shortcut="pool"),
    "resnet s": ResNetConfig(**RESNET, stem="deep", stem_width=8),
    "resnet t": ResNetConfig(**RESNET, **TIERED),
    "resnet without head": ResNetConfig(**{**RESNET, "num_classes": 0}),
    "resnet of two channels": ResNetConfig(**RESNET, in_channels=2),
    "seresnet": ResNetConfig(**RESNET, attention="squeeze_excite"),
    "seresnext t": ResNetConfig(**BOTTLENECK, **TIERED, attention="squeeze_excite", cardinality=2, base_width=32),
    "senet": ResNetConfig(**BOTTLENECK, attention="squeeze_excite", reduce_first=2, shortcut_kernel=3),
    "ecaresnet": ResNetConfig(**BOTTLENECK, attention="eca"),
    "resnet-rs": ResNetConfig(**BOTTLENECK, **TIERED, attention="squeeze_excite", squeeze=0.25, stem_pool="conv"),
    "resnet, averaged": ResNetConfig(**BOTTLENECK, antialias="average"),
    "resnet, blurred": ResNetConfig(**RESNET, antialias="blur"),
    "resnet, group norms": ResNetConfig(**{**RESNET, "widths": (32, 32, 32, 64)}, norm_groups=32),
}


def made(config: Any, seed: int = 0) -> tuple[Any, eqx.nn.State]:
    """A model in which every number matters to the output, and its state."""
    model = {ViTConfig: eqzoo.ViT, ResNetConfig: eqzoo.ResNet, MLPConfig: eqzoo.MLP}[type(config)]
    pair = _skeleton(partial(model, config))
    random = np.random.default_rng(seed)

    def drawn(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, 7, leaf.dtype)
        shape, noise = leaf.shape[path.count("[*]") :], random.standard_normal(leaf.shape, np.float32)
        if path.endswith(".var"):
            noise = 0.5 + np.abs(noise)
        elif path.endswith((".bias", ".mean")):
            noise *= 0.3
        elif path.endswith(".weight"):
            noise = 1 + 0.3 * noise if len(shape) == 1 else noise / np.sqrt(np.prod(shape[1:]))
        return jnp.asarray(noise, leaf.dtype)

    return _split(map_with_path(drawn, _merge(*pair)), *pair)


def images(config: Any, number: int = 2) -> np.ndarray:
    size = getattr(config, "image_size", 32)
    return np.random.default_rng(0).normal(size=(number, size, size, config.in_channels)).astype(np.float32)


@eqx.filter_jit
def outputs(model: Any, x: Any) -> Any:
    return jax.vmap(model)(x)


def assert_same_logits(pair: tuple[Any, eqx.nn.State], upstream: torch.nn.Module, tolerance: float = 1e-4) -> None:
    x = images(pair[0].config)
    with torch.no_grad():
        theirs = upstream.eval()(torch.tensor(x).permute(0, 3, 1, 2))
    assert_close(outputs(eqzoo.freeze(*pair), x), theirs, tolerance)


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_timm_folder_is_the_same_model_in_timm_and_back(case, tmp_path, caplog):
    pair = made(CONFIGS[case])
    eqzoo.export(tmp_path / "out", *pair, format="timm")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    with caplog.at_level("INFO", "timm"):
        upstream = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert not [line for line in caplog.messages if "keys" in line or "match" in line]
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert_same_tensors(written, upstream.state_dict())
    assert {tensor.dtype for name, tensor in written.items() if "num_batches" in name} <= {torch.int64}
    assert_same_logits(pair, upstream)

    back = eqzoo.load(tmp_path / "out", trainable=True)
    assert back[0].config == pair[0].config
    assert eqx.tree_equal(back, pair)


@pytest.mark.parametrize("case", ["distilled", "resnet t"])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_timm_file_loads_strictly_and_comes_back(case, ending, tmp_path):
    pair = made(CONFIGS[case])
    eqzoo.export(tmp_path / "folder", *pair, format="timm")
    eqzoo.export(tmp_path / f"model{ending}", *pair, format="timm")
    upstream = timm.create_model(f"local-dir:{tmp_path / 'folder'}")
    read = partial(torch.load, weights_only=True) if ending == ".pth" else safetensors.torch.load_file
    upstream.load_state_dict(read(tmp_path / f"model{ending}"), strict=True)
    assert_same_logits(pair, upstream)
    (tmp_path / "folder" / "model.safetensors").unlink()
    (tmp_path / f"model{ending}").rename(tmp_path / "folder" / f"model{ending}")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "folder", trainable=True), pair)


@pytest.mark.parametrize(
    "case", ["vit", "distilled", "vit without head", "resnet", "resnet t", "resnet of two channels"]
)
@pytest.mark.parametrize("change", [{"num_classes": 3}, {"in_chans": 1}, {"num_classes": 0}])
def test_timm_fine_tunes_what_was_exported(case, change, tmp_path):
    """timm finds the head and the first convolution by the names in our config.json."""
    pair = made(CONFIGS[case])
    eqzoo.export(tmp_path / "out", *pair, format="timm")
    upstream = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, **change).eval()
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    shared = {name for name, x in upstream.state_dict().items() if name in written and x.shape == written[name].shape}
    assert shared == {name for name in written if not name.startswith(tuple(_changed(case, change)))}
    assert all(torch.equal(written[name], upstream.state_dict()[name]) for name in shared)


def _changed(case: str, change: dict[str, int]) -> list[str]:
    if "in_chans" in change:
        return {"vit": ["patch_embed.proj.weight"], "dis": ["patch_embed.proj.weight"]}.get(
            case[:3], ["conv1.0.weight" if case == "resnet t" else "conv1.weight"]
        )
    return ["head", "fc."]


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "drop_path"])
def test_what_matters_in_training_only_does_not_keep_a_vit_from_timm(option, tmp_path):
    pair = made(ViTConfig(**VIT, **{option: 0.25}))
    eqzoo.export(tmp_path / "out", *pair, format="timm")
    upstream = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert_same_logits(pair, upstream)
    if option == "drop_path":
        assert upstream.blocks[-1].drop_path1.drop_prob == 0.25


@pytest.fixture(scope="module")
def small_resnet():
    """torchvision's smallest, with another head."""
    config = ResNetConfig(block="basic", depths=(2, 2, 2, 2), num_classes=5)
    return made(config)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_resnet_is_the_same_in_torchvision(small_resnet, ending, tmp_path):
    path = tmp_path / f"resnet18{ending}"
    eqzoo.export(path, *small_resnet, format="torchvision")
    state_dict = torch.load(path, weights_only=True) if ending == ".pth" else safetensors.torch.load_file(path)
    upstream = torchvision.models.resnet18(num_classes=5)
    upstream.load_state_dict(state_dict, strict=True)
    assert_same_logits(small_resnet, upstream)
    assert state_dict["bn1.num_batches_tracked"] == 7
    assert state_dict["bn1.num_batches_tracked"].dtype == torch.int64
    assert eqx.tree_equal(eqzoo.load(path, name="resnet18", num_classes=5, trainable=True), small_resnet)


def test_a_vit_is_the_same_in_torchvision(tmp_path):
    """Of another image size, trained with dropout."""
    config = ViTConfig(dim=768, depth=12, heads=12, patch_size=32, image_size=64, num_classes=3, dropout=0.1)
    pair = made(config)
    eqzoo.export(tmp_path / "vit_b_32.pth", *pair, format="torchvision")
    upstream = torchvision.models.vit_b_32(image_size=64, num_classes=3)
    upstream.load_state_dict(torch.load(tmp_path / "vit_b_32.pth", weights_only=True), strict=True)
    assert_same_logits(pair, upstream)


RESNET18 = {"block": "basic", "depths": (2, 2, 2, 2)}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (ResNetConfig(**RESNET18, attention="squeeze_excite"), "attention='squeeze_excite'"),
        (ResNetConfig(**RESNET18, in_channels=1), "in_channels=1"),
        (ResNetConfig(**RESNET18, num_classes=0), "num_classes=0"),
        (ResNetConfig(**RESNET18, shortcut="pool"), "shortcut='pool'"),
        (ResNetConfig(block="basic", depths=(2, 2, 2, 1)), r"depths=\(2, 2, 2, 1\)"),
        (ViTConfig(dim=768, depth=12, heads=12, in_channels=1, registers=1), "in_channels=1, registers=1"),
        (ViTConfig(dim=768, depth=12, heads=12, distilled=True), "distilled=True"),
    ],
)
def test_what_torchvision_does_not_have_is_refused(config, sentence, tmp_path):
    with pytest.raises(ValueError, match=rf"export: torchvision has no \w+ with {sentence} \(the nearest") as caught:
        eqzoo.export(tmp_path / "x.pth", *made(config), format="torchvision")
    assert str(caught.value).endswith("use `eqzoo.save`")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (ViTConfig(**VIT, norm_eps=1e-3), "norm_eps=0.001"),
        (ViTConfig(**{**VIT, "dim": 25, "heads": 5}, norm_eps=0.1, distilled=True), "norm_eps=0.1"),
        (
            ResNetConfig(block="basic", depths=(1, 1), widths=(8, 8)),
            r"depths=\(1, 1\), widths=\(8, 8\)",
        ),
    ],
)
def test_what_timm_does_not_have_is_refused(config, sentence, tmp_path):
    with pytest.raises(ValueError, match=rf"export: timm has no \w+ with {sentence} \(the nearest"):
        eqzoo.export(tmp_path / "x", *made(config), format="timm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["timm", "torchvision"])
def test_a_family_that_upstream_does_not_have_is_refused(format, tmp_path):
    pair = made(MLPConfig(hidden=(4,)))
    with pytest.raises(ValueError, match=f"export: {format} has no MLP; use `eqzoo.save`"):
        eqzoo.export(tmp_path / "x.pth", *pair, format=format)


def test_torchvision_has_no_folders(tmp_path):
    with pytest.raises(ValueError, match="torchvision has no folders; let .*out end in .pth or .safetensors"):
        eqzoo.export(tmp_path / "out", *made(CONFIGS["resnet"]), format="torchvision")


class Own(eqx.Module):
    weight: jax.Array

    def __call__(self, x, *, key=None):
        return self.weight * x


def test_a_model_of_ones_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="export: a Own is none of the zoo's models, .*; write it with `eqzoo.save`"):
        eqzoo.export(tmp_path / "x.pth", Own(jnp.ones(3)), format="timm")


def test_a_stateful_model_needs_its_state(tmp_path):
    model, _ = made(CONFIGS["resnet"])
    with pytest.raises(ValueError, match=r"export: a ResNet has running statistics; .*export\(path, model, state\)"):
        eqzoo.export(tmp_path / "x", model, format="timm")


@pytest.mark.parametrize("path", ["x", "x.pth", "x.safetensors"])
def test_a_model_that_is_no_longer_what_its_config_says_is_refused(path, tmp_path):
    model, state = made(CONFIGS["resnet"])
    model = eqx.tree_at(lambda m: m.head, model, eqzoo.nn.Linear(16, 9, key=jax.random.key(0)))
    with pytest.raises(CheckpointError, match=r"fc.weight: shape \(9, 16\)") as caught:
        eqzoo.export(tmp_path / path, model, state, format="timm")
    assert "timm could not rebuild it: give it the config it has become" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["vit", "resnet"])
def test_a_frozen_model_is_exported_like_its_pair(case, tmp_path):
    pair = made(CONFIGS[case])
    eqzoo.export(tmp_path / "frozen.pth", eqzoo.freeze(*pair), format="timm")
    eqzoo.export(tmp_path / "pair.pth", *pair, format="timm")
    frozen, both = (torch.load(tmp_path / f"{name}.pth", weights_only=True) for name in ("frozen", "pair"))
    assert_same_tensors(frozen, both)


@pytest.mark.parametrize("path", ["x/model.safetensors", "x.pth", "x.safetensors"])
@pytest.mark.parametrize("case", ["vit", "resnet"])
def test_bfloat16_stays_bfloat16(case, path, tmp_path):
    """Parameters do; running statistics are float32."""
    model, state = made(CONFIGS[case])
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    eqzoo.export(tmp_path / path.removesuffix("/model.safetensors"), model, state, format="timm")
    read = partial(torch.load, weights_only=True) if path.endswith(".pth") else safetensors.torch.load_file
    written = read(tmp_path / path)
    for name, tensor in written.items():
        running, count = "running_" in name, "num_batches" in name
        assert tensor.dtype == (torch.int64 if count else torch.float32 if running else torch.bfloat16)
    head = written["head.weight" if case == "vit" else "fc.weight"]
    assert np.array_equal(head.float().numpy(), np.asarray(model.head.weight, np.float32))


class DiskFull(OSError):
    pass


def _half_written(path: Path, *_: Any) -> None:
    Path(path).write_bytes(b"half")
    raise DiskFull


@pytest.mark.parametrize("name", ["out", "out.pth", "out.safetensors"])
@pytest.mark.parametrize("before", [False, True])
def test_nothing_half_written_is_left_behind(name, before, tmp_path, monkeypatch):
    """What was there before is still there, and whole."""
    pair, path = made(CONFIGS["resnet"]), tmp_path / name
    if before:
        eqzoo.export(path, *made(CONFIGS["resnet without head"]), format="timm")
    contents = _contents(tmp_path)
    monkeypatch.setattr(eqzoo._save, "write_state_dict", _half_written)
    monkeypatch.setattr("safetensors.numpy.save_file", lambda tensors, path, metadata: _half_written(path))
    with pytest.raises(DiskFull):
        eqzoo.export(path, *pair, format="timm")
    assert _contents(tmp_path) == contents


def test_a_config_that_can_not_be_written_leaves_the_weights_of_before(tmp_path, monkeypatch):
    eqzoo.export(tmp_path / "out", *made(CONFIGS["resnet without head"]), format="timm")
    contents = _contents(tmp_path)
    monkeypatch.setattr(Path, "write_text", _half_written)
    with pytest.raises(DiskFull):
        eqzoo.export(tmp_path / "out", *made(CONFIGS["resnet"]), format="timm")
    assert _contents(tmp_path) == contents


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["out", "out.pth", "out.safetensors"])
def test_a_missing_parent_folder_is_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        eqzoo.export(tmp_path / "missing" / name, *made(CONFIGS["vit"]), format="timm")


def test_a_folder_is_written_over_a_folder(tmp_path):
    eqzoo.export(tmp_path / "out", *made(CONFIGS["vit"]), format="timm")
    pair = made(CONFIGS["distilled"], seed=1)
    eqzoo.export(tmp_path / "out", *pair, format="timm")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "out", trainable=True), pair)


def test_config_json_states_only_what_differs(tmp_path):
    eqzoo.export(tmp_path / "out", *made(CONFIGS["deit3"]), format="timm")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["architecture"].startswith("deit3_")
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32}
    assert saved["model_args"] == {**sizes, "num_classes": 5}


def test_a_pth_is_what_torch_writes(tmp_path):
    eqzoo.export(tmp_path / "x.pth", *made(CONFIGS["resnet"]), format="timm")
    assert zipfile.ZipFile(tmp_path / "x.pth").testzip() is None
    assert next(iter(torch.load(tmp_path / "x.pth", weights_only=True))) == "conv1.weight"


@pytest.mark.parametrize("family", families(), ids=lambda family: family.model.__name__)
def test_every_variant_of_timms_is_described_by_its_name(family):
    """The names that upstream has for one config are one description."""
    upstreams = [upstream for naming, upstream in family.upstreams.items() if naming.startswith("timm")]
    for name in (name for upstream in upstreams for name in family.variants if upstream.has(name)):
        model = SimpleNamespace(config=family.variants[name])
        _, base, options = eqzoo._save._described_upstream(model, family, "timm")
        assert (family.variants[base], options) == (model.config, {})
