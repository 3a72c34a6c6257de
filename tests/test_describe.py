"""Which model a source holds: what timm and eqzoo say of it is understood, and nonsense is refused quickly."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import timm
import torch
from timm.models._hub import save_for_hf

import eqzoo
from eqzoo import CheckpointError
from eqzoo._describe import describe, from_config_json
from eqzoo._facts import torchvision_facts
from eqzoo._registry import variant
from eqzoo.checkpoint.formats import write_safetensors
from eqzoo.models.vision.vit import ViTConfig
from tests.parity import assert_close, randomise

SIZES = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8}
WIDTHS = {"channels": (8, 8, 16, 16)}
FOLDERS = {
    "size as a pair": ("vit_tiny_patch16_224", {**SIZES, "img_size": (32, 32), "num_classes": 5}),
    "average pool without fc_norm stated": (
        "vit_tiny_patch16_224",
        {**SIZES, "img_size": 32, "num_classes": 5, "global_pool": "avg", "act_layer": "gelu_tanh"},
    ),
    "one channel and no head": ("vit_tiny_patch16_224", {**SIZES, "img_size": 32, "in_chans": 1, "num_classes": 0}),
    "any image size": ("vit_small_patch14_reg4_dinov2", {**SIZES, "img_size": 32, "dynamic_img_size": True}),
    "distilled": ("deit_tiny_distilled_patch16_224", {**SIZES, "img_size": 32, "num_classes": 3}),
    "registers": ("vit_betwixt_patch16_reg4_gap_256", {**SIZES, "img_size": 48, "drop_path_rate": 0.1}),
    "resnet of one channel and no head": ("resnet18", {**WIDTHS, "num_classes": 0, "in_chans": 1}),
    "resnet d": ("resnet18d", {**WIDTHS, "layers": (1, 1, 1, 1), "stem_width": 8, "num_classes": 3}),
    "seresnet": ("seresnet18", {**WIDTHS, "layers": (1, 1, 1, 1), "num_classes": 3}),
}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_timm_saved_is_the_same_model(case, safe, tmp_path):
    name, options = FOLDERS[case]
    upstream = randomise(timm.create_model(name, **options), 0).eval()
    save_for_hf(upstream, tmp_path, safe_serialization=safe)
    model = eqzoo.load(tmp_path)
    size = getattr(model.config, "image_size", 32)
    assert (model.config.in_channels, model.config.num_classes) == (upstream.in_chans, upstream.num_classes)
    if safe:  # the other file holds the same
        x = np.random.default_rng(0).normal(size=(2, size, size, model.config.in_channels)).astype(np.float32)
        with torch.no_grad():
            theirs = upstream(torch.tensor(x).permute(0, 3, 1, 2))
        assert_close(jax.jit(jax.vmap(model))(x), theirs, 1e-4)


def test_an_old_config_without_pretrained_cfg_is_understood():
    saved = {"architecture": "vit_tiny_patch16_224", "num_classes": 7, "input_size": [1, 96, 96]}
    description = from_config_json({**saved, "fixed_input_size": True, "mean": [0.5]})
    assert description.label == "vit_tiny_patch16_224"
    assert description.config == ViTConfig(dim=192, depth=12, heads=3, image_size=96, in_channels=1, num_classes=7)


def test_the_number_of_classes_at_the_top_counts():
    saved = {"architecture": "resnet18", "num_classes": 3, "pretrained_cfg": {"num_classes": 1000}}
    assert from_config_json(saved).config.num_classes == 3


@pytest.mark.parametrize("name", ["vit_tiny_patch16_dinov3_qkvb", "vit_base_patch16_siglip_gap_224"])
def test_an_option_that_is_the_variants_own_changes_nothing_else(name):
    """Elsewhere a norm goes with the pool; these have none, and their folders state the pool."""
    same = json.loads(timm_config(name, global_pool="avg"))
    assert from_config_json(same).config == variant(name)[1]
    other = json.loads(timm_config("vit_tiny_patch16_224", global_pool="avg"))
    assert from_config_json(other).config == dataclasses.replace(
        variant("vit_tiny_patch16_224")[1], pool="avg", fc_norm=True
    )


def test_an_image_size_is_that_of_the_input_only_where_it_is_fixed():
    saved = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 384, 384]}}
    assert from_config_json(saved).config.image_size == 224


@pytest.mark.parametrize("source", [f"torchvision/{name}" for name in torchvision_facts()])
def test_every_source_of_torchvision_is_described(source):
    name, _, weights = source.removeprefix("torchvision/").partition(".")
    label, _, config = describe(source, Path(f"{name}.pth"), {})
    assert label == source
    usual = variant(f"torchvision/{name}")[1]
    if weights.startswith("IMAGENET1K_SWAG_E2E") and name.startswith("vit"):
        assert config.image_size == {"vit_b_16": 384, "vit_l_16": 512, "vit_h_14": 518}[name]
    elif name.startswith(("fcn_", "deeplabv3_")):  # published with the head that helped in training
        assert config == dataclasses.replace(usual, aux_head=True)
    else:
        assert config == usual


def test_a_name_decides_over_what_the_file_says(tmp_path):
    pair = eqzoo.create("mlp", hidden=(4,), image_size=4, key=jax.random.key(0))
    eqzoo.save(tmp_path / "x.safetensors", *pair)
    with pytest.raises(CheckpointError, match="does not fit resnet18"):
        eqzoo.load(tmp_path / "x.safetensors", name="resnet18")


def test_a_bare_file_asks_for_a_name(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"fc.weight": np.zeros((2, 2), np.float32)}, {})
    with pytest.raises(CheckpointError, match="x.safetensors doesn't say which model it holds: pass `name=`, one of"):
        eqzoo.load(tmp_path / "x.safetensors")


def timm_config(architecture: str, **options: Any) -> str:
    return json.dumps({"architecture": architecture, "model_args": options})


def vit(**options: Any) -> str:
    return timm_config("vit_tiny_patch16_224", **options)


HOSTILE = {
    "not JSON": ('{"architecture"', "Expecting ':'"),
    "nothing": ("", "Expecting value"),
    "not text": (b"\xff\xfe\x00\xd8", "decode|Expecting"),
    "a list": ("[1]", "it is not a JSON object"),
    "null": ("null", "it is not a JSON object"),
    "an empty object": ("{}", "it has neither timm's `architecture` nor transformers' `model_type`"),
    "nested lists": ("[" * 100_000, "recursion"),
    "nested objects": ('{"architecture":' * 100_000, "recursion"),
    "nested options": (vit(depth=1)[:-3] + "[" * 900 + "]" * 900 + "}}", "."),
    "an architecture with near misses": (
        timm_config("resnet19"),
        "no model named 'timm/resnet19'; did you mean resnet18",
    ),
    "an architecture that is a list": (timm_config(["resnet18"]), "there is no model named"),
    "an architecture of a million letters": (timm_config("r" * 10**6), "there is no model named"),
    "an unknown model_type": ('{"model_type": "electra"}', "no model of model_type 'electra'; it has .*gpt2"),
    "a model_type that is a list": ('{"model_type": ["gpt2"]}', "list"),
    "an unknown option": (vit(rope=True), "option 'rope' .of value True. is not known to eqzoo"),
    "an unknown value": (vit(global_pool="prr"), "global_pool='prr' is not supported; eqzoo has 'token', 'avg', 'map'"),
    "a list as value": (vit(act_layer=["gelu"]), r"act_layer=\['gelu'\] is not supported"),
    "another value than all have": (timm_config("vgg11", output_stride=16), "output_stride=16 is not supported"),
    "options in a list": ('{"architecture": "resnet18", "model_args": [1]}', "."),
    "a number for pretrained_cfg": ('{"architecture": "resnet18", "pretrained_cfg": 7}', "."),
    "an input_size of one": ('{"architecture": "resnet18", "input_size": [3]}', "."),
    "images that are not square": (vit(img_size=[224, 240]), r"img_size=\[224, 240\] is not square"),
    "an input that is not square": (
        '{"architecture": "vit_tiny_patch16_224", "input_size": [3, 224, 240], "fixed_input_size": true}',
        "its images are 224 x 240; eqzoo's ViT takes square ones",
    ),
    "an absurd depth": (vit(depth=10**9), "a model of .* in 16000000008 weights was described, but the file holds"),
    "a depth beyond 64 bits": (vit(depth=10**30), "."),
    "an absurd width": (vit(embed_dim=3 * 10**9), "a model of 1296000006375000001000 numbers"),
    "a large width": (vit(embed_dim=300_000), "a model of 12960637501000 numbers"),
    "a width beyond 64 bits": (vit(embed_dim=3 * 10**30), "no model can be made of ViTConfig"),
    "absurd widths": (timm_config("resnet18", channels=[10**6] * 4), "a model of"),
    "absurd depths": (timm_config("resnet18", layers=[10**9] * 4), "a model of"),
    "thousands of stages": (
        timm_config("resnet18", layers=[1] * 3000, channels=[64] * 3000),
        "options are longer than",
    ),
    "absurdly many classes": ('{"architecture": "resnet18", "num_classes": 1000000000000}', "a model of"),
    "absurdly many registers": (vit(reg_tokens=10**12), "a model of"),
    "an absurd image": (vit(img_size=16 * 10**9), "a model of"),
    "an absurd vocabulary": ('{"model_type": "gpt2", "vocab_size": 1000000000000}', "a model of"),
    "a negative width": (vit(embed_dim=-3), "no model can be made of ViTConfig"),
    "no width": (vit(embed_dim=0), "does not fit"),
    "no heads": (vit(num_heads=0), "zero"),
    "no patch": (vit(patch_size=0), "zero"),
    "a negative number of classes": ('{"architecture": "resnet18", "num_classes": -5}', "no model can be made of"),
    "a word for a number": (vit(depth="12"), "no model can be made of ViTConfig"),
    "a fraction": (vit(embed_dim=192.5), "dim=192.5"),
    "not a number": (vit(embed_dim=float("nan")), "dim=nan"),
    "infinity": (vit(mlp_ratio=float("inf")), "no model can be made of ViTConfig"),
    "null for a number": (vit(depth=None), "no model can be made of ViTConfig"),
    "an object for a list": (timm_config("resnet18", layers={"a": 1}), "depths={'a': 1}"),
}


RESNET = {"block": "basic", "depths": [1, 1], "widths": [8, 8]}
HOSTILE_METADATA = {
    "metadata, not JSON": ("{", "Expecting"),
    "metadata, a list": ("[]", "."),
    "metadata, nested lists": ("[" * 100_000, "recursion"),
    "metadata, no model": ("{}", "it has no 'model'"),
    "metadata, no config": ('{"model": "ResNet"}', "it has no 'config'"),
    "metadata, an unknown class": (
        '{"model": "Own", "config": {}}',
        "there is no model class 'Own'; upgrade eqzoo, or pass `name=`",
    ),
    "metadata, a class of Python's": ('{"model": "os.system", "config": {}}', "there is no model class 'os.system'"),
    "metadata, a config that is a list": ('{"model": "ResNet", "config": []}', "."),
    "metadata, an empty config": ('{"model": "ResNet", "config": {}}', "'block'"),
    "metadata, an unknown field": ({**RESNET, "rope": True}, "rope"),
    "metadata, a wrong choice": ({**RESNET, "block": "spiral"}, "block='spiral'"),
    "metadata, a wrong type": ({**RESNET, "widths": ["8", "8"]}, "no model can be made of ResNetConfig"),
    "metadata, fields that don't fit": ({**RESNET, "depths": [1]}, "differ in length"),
    "metadata, an absurd depth": ({**RESNET, "depths": [10**9, 1]}, "a model of"),
    "metadata, an absurd width": ({**RESNET, "widths": [10**9, 8]}, "a model of"),
    "metadata, thousands of stages": (
        {**RESNET, "depths": [1] * 3000, "widths": [8] * 3000},
        "options are longer than",
    ),
}


# In a process of its own, whose memory is limited, and where no import hook checks types before eqzoo does.
LOAD_ALL = """
import json, pathlib, resource, sys, time
import eqzoo
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
eqzoo.list_models()
results = {}
for path in map(pathlib.Path, sys.argv[1:]):
    begin = time.perf_counter()
    try:
        error = f"{eqzoo.load(path)} was loaded"
        kind = "none"
    except Exception as caught:
        kind, error = type(caught).__name__, str(caught)
    results[path.stem] = kind, error, time.perf_counter() - begin
status = pathlib.Path("/proc/self/status").read_text()  # `getrusage` would count the parent's memory before `exec`
peak = int(status.split("VmHWM:")[1].split()[0]) << 10
print(json.dumps([results, peak]))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[dict[str, tuple[str, str, float]], int]:
    """The kind of error, its message and the time it took for each case, and the memory that all of them took."""
    root = tmp_path_factory.mktemp("hostile")
    tensors = {"head.weight": np.zeros((5, 24), np.float32)}
    for case, (content, _) in HOSTILE.items():
        (root / case).mkdir()
        (root / case / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        write_safetensors(root / case / "model.safetensors", tensors, {})
    for case, (content, _) in HOSTILE_METADATA.items():
        text = content if isinstance(content, str) else json.dumps({"model": "ResNet", "config": content})
        write_safetensors(root / f"{case}.safetensors", tensors, {"eqzoo": text})
    command = [sys.executable, "-c", LOAD_ALL, *map(str, sorted(root.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [*HOSTILE, *HOSTILE_METADATA])
def test_what_is_no_models_description_is_refused_quickly(case, results):
    _, sentence = {**HOSTILE, **HOSTILE_METADATA}[case]
    kind, message, seconds = results[0][case]
    assert (kind, re.search(sentence, message) is not None) == ("CheckpointError", True), message
    assert len(message.partition("\n")[0]) < 1500
    assert seconds < 20


def test_refusing_takes_little_memory(results):
    assert results[1] < 2 << 30


def test_an_ordinary_mismatch_is_reported_in_full(tmp_path):
    """The guard against absurd sizes lets a file through that is far too small for its model."""
    (tmp_path / "config.json").write_text('{"architecture": "resnet50"}')
    write_safetensors(tmp_path / "model.safetensors", {"fc.weight": np.zeros((5, 24), np.float32)}, {})
    with pytest.raises(CheckpointError, match="does not fit resnet50: 266 missing, 0 unexpected, 1 of a wrong shape"):
        eqzoo.load(tmp_path)
