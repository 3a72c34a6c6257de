"""Files as upstream writes them, with the outputs upstream computes: made with torch, loaded by tests without it.

python -m tests.upstream_files FOLDER      makes all of them, for an environment that has no torch

A case is a folder: `files`; `case.json`, how `eqzoo.load` is to be called; `expected.npz`, an input and the output that
upstream computes, or the bytes of every tensor.
"""

import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("float16", "bfloat16", "float32", "float64", "bool", "complex64", *INTEGERS, *FLOAT8)


def tensors_of_every_dtype_and_stride() -> dict[str, Any]:
    import torch

    def random_bits(dtype: str, *shape: int) -> torch.Tensor:
        size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
        return raw.view(getattr(torch, dtype))

    base = random_bits("float32", 4, 6)
    return {
        "odd": torch.ones(1, dtype=torch.int8),  # what follows isn't aligned
        **{dtype: random_bits(dtype, 3, 5) for dtype in DTYPES},
        "transposed": base.t(),
        "offset": base[1:, 2:],
        "stepped": base[::2, ::3],
        "expanded": base[:, :1].expand(4, 5),
        "channels last": random_bits("bfloat16", 1, 2, 3, 4).to(memory_format=torch.channels_last),
        "scalar": base[3, 5],
        "empty": base[:0],
    }


def _files(folder: Path) -> Path:
    (folder / "files").mkdir()
    return folder / "files"


def tensors_case(write: Callable[[dict[str, Any], Path], None], *, only_numpy: bool = False) -> Callable[[Path], None]:
    """A case whose files hold tensors of every kind."""

    def make(folder: Path) -> None:
        import torch

        tensors = tensors_of_every_dtype_and_stride()
        if only_numpy:
            tensors = {
                name: each for name, each in tensors.items() if name not in (*FLOAT8, "bfloat16", "channels last")
            }
        write(tensors, _files(folder))
        expected = {}
        for name, each in tensors.items():
            flat = each.contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy() if each.numel() else np.zeros(0, np.uint8)
            expected[f"bytes {name}"] = raw
            expected[f"kind {name}"] = np.array([str(each.dtype).removeprefix("torch."), *map(str, each.shape)])
        np.savez(folder / "expected.npz", **expected)

    return make


def _zip(tensors: dict[str, Any], folder: Path) -> None:
    import torch

    torch.save(tensors, folder / "model.pth")


def _legacy(tensors: dict[str, Any], folder: Path) -> None:
    import torch

    torch.save(tensors, folder / "model.pth", _use_new_zipfile_serialization=False)


def _training(tensors: dict[str, Any], folder: Path) -> None:
    """A whole training run: parameters in an `OrderedDict`, wrapped, prefixed, beside an optimizer's state."""
    import torch

    state_dict = collections.OrderedDict({f"module._orig_mod.{name}": each for name, each in tensors.items()})
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"epoch": 3, "optimizer": optimizer, "state_dict": state_dict}, folder / "checkpoint.pth")


def _safetensors(tensors: dict[str, Any], folder: Path) -> None:
    import safetensors.torch

    tensors = {name: each.contiguous().clone() for name, each in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _npz(tensors: dict[str, Any], folder: Path) -> None:
    np.savez(folder / "model.npz", **{name: each.numpy() for name, each in tensors.items()})


def _shards(write: Callable[[dict[str, Any], Path], None], written: str, shard: str, index: str):
    def make(tensors: dict[str, Any], folder: Path) -> None:
        names, weight_map = list(tensors), {}
        for number, part in enumerate((names[:5], names[5:]), 1):
            write({name: tensors[name] for name in part}, folder)
            file = shard.format(number)
            (folder / written).rename(folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return make


def model_case(
    make_upstream: Callable[[], Any],
    write: Callable[[Any, Path], None],
    *,
    source: str = "",
    shape: tuple[int, ...] | None = (32, 32, 3),
    expect: Callable[[Any, Path], Any] = lambda model, folder: model,
    **load: Any,
) -> Callable[[Path], None]:
    """A case whose `source` among its files is to be loaded with the options `load`, and what it computes then.

    `expect` gives the model upstream that `eqzoo.load` should equal, if it isn't the one that was written.
    """

    def make(folder: Path) -> None:
        import torch

        from tests.parity import randomise

        model = randomise(make_upstream().eval(), 0)
        write(model, _files(folder))
        model = expect(model, folder / "files").eval()
        rng = np.random.default_rng(0)
        with torch.no_grad():
            if shape is None:
                inputs = rng.integers(0, model.config.vocab_size, 8)
                output = model(torch.tensor(inputs)[None])
                output = output.logits[0]
            else:
                inputs = rng.normal(size=shape).astype(np.float32)
                output = model(torch.tensor(inputs).permute(2, 0, 1)[None])
                output = getattr(output, "logits", output)[0]
        np.savez(folder / "expected.npz", inputs=inputs, outputs=output.float().numpy())
        (folder / "case.json").write_text(json.dumps({"source": f"files/{source}", "load": load}))

    return make


def _timm(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        return timm.create_model(name, **options)

    return make


def _timm_folder(model: Any, folder: Path) -> None:
    from timm.models._hub import save_for_hf

    save_for_hf(model, str(folder), safe_serialization=True)


def _timm_bin_folder(model: Any, folder: Path) -> None:
    from timm.models._hub import save_for_hf

    save_for_hf(model, str(folder), safe_serialization=False)


def _adapted(**options: Any) -> Callable[[Any, Path], Any]:
    """timm's own adaptation of what lies in the folder."""

    def expect(model: Any, folder: Path) -> Any:
        import timm

        return timm.create_model(f"local-dir:{folder}", pretrained=True, **options)

    return expect


def _without_classifier(model: Any, folder: Path) -> Any:
    model.reset_classifier(0)
    return model


def _torchvision(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchvision

        return torchvision.models.get_model(name, **options)

    return make


def _state_dict(model: Any, folder: Path) -> None:
    _zip(model.state_dict(), folder)


def _with_ema(model: Any, folder: Path) -> None:
    """Two state dicts in one file: the one wanted is the second."""
    import torch

    other = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    ema = {f"module.{name}": each for name, each in model.state_dict().items()}
    torch.save({"model": other, "model_ema": ema, "epoch": 7}, folder / "model.pth")


def _gpt2(head: bool = True, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        sizes = {"n_embd": 24, "n_layer": 3, "n_head": 3, "vocab_size": 61, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options))

    return make


def _pretrained(**options: Any) -> Callable[[Any, Path], None]:
    return lambda model, folder: model.save_pretrained(folder, **options)


def _pretrained_bin(model: Any, folder: Path) -> None:
    """As transformers wrote it before safetensors, the tied head repeated."""
    import torch

    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def _pretrained_body(model: Any, folder: Path) -> None:
    model.transformer.save_pretrained(folder)


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
_SHARDS = {
    "safetensors": _shards(
        _safetensors, "model.safetensors", "model-{:05}-of-00002.safetensors", "model.safetensors.index.json"
    ),
    "bin": _shards(_zip, "model.pth", "pytorch_model-{:05}-of-00002.bin", "pytorch_model.bin.index.json"),
}

CASES: dict[str, Callable[[Path], None]] = {
    "tensors, torch zip": tensors_case(_zip),
    "tensors, torch legacy": tensors_case(_legacy),
    "tensors, a training run": tensors_case(_training),
    "tensors, safetensors": tensors_case(_safetensors),
    "tensors, npz": tensors_case(_npz, only_numpy=True),
    "tensors, safetensors shards": tensors_case(_SHARDS["safetensors"]),
    "tensors, bin shards": tensors_case(_SHARDS["bin"]),
    "torchvision, state dict": model_case(
        _torchvision("resnet18", num_classes=10), _state_dict, source="model.pth", name="resnet18", num_classes=10
    ),
    "torchvision, ema": model_case(
        _torchvision("resnet18"), _with_ema, source="model.pth", name="resnet18", entry="model_ema"
    ),
    "torchvision, features": model_case(
        _torchvision("resnet18", num_classes=7),
        _state_dict,
        source="model.pth",
        expect=lambda model, folder: _headless(model),
        name="resnet18",
        num_classes=0,
    ),
    "timm, resnet": model_case(_timm("resnet10t", num_classes=5), _timm_folder),
    "timm, resnet as bin": model_case(_timm("resnet10t", num_classes=5), _timm_bin_folder),
    "timm, resnet of one channel": model_case(
        _timm("resnet10t", num_classes=5), _timm_folder, expect=_adapted(in_chans=1), shape=(32, 32, 1), in_channels=1
    ),
    "timm, resnet of five channels": model_case(
        _timm("resnet10t", num_classes=5), _timm_folder, expect=_adapted(in_chans=5), shape=(32, 32, 5), in_channels=5
    ),
    "timm, vit": model_case(_timm("vit_tiny_patch16_224", **_VIT), _timm_folder),
    "timm, vit averaged": model_case(_timm("vit_tiny_patch16_224", global_pool="avg", **_VIT), _timm_folder),
    "timm, vit enlarged": model_case(
        _timm("vit_tiny_patch16_224", **_VIT),
        _timm_folder,
        expect=_adapted(img_size=48),
        shape=(48, 48, 3),
        image_size=48,
    ),
    "timm, deit3 shrunk": model_case(
        _timm("deit3_small_patch16_224", **_VIT),
        _timm_folder,
        expect=_adapted(img_size=24),
        shape=(24, 24, 3),
        image_size=24,
    ),
    "timm, distilled without a head": model_case(
        _timm("deit_tiny_distilled_patch16_224", **_VIT), _timm_folder, expect=_without_classifier, num_classes=0
    ),
    "transformers, gpt2": model_case(_gpt2(), _pretrained(), shape=None),
    "transformers, gpt2 untied": model_case(_gpt2(tie_word_embeddings=False), _pretrained(), shape=None),
    "transformers, gpt2 in shards": model_case(_gpt2(), _pretrained(max_shard_size="20KB"), shape=None),
    "transformers, gpt2 as bin": model_case(_gpt2(), _pretrained_bin, shape=None),
    "transformers, gpt2 body": model_case(_gpt2(), _pretrained_body, shape=None),
}


def _headless(model: Any) -> Any:
    import torch

    model.fc = torch.nn.Identity()
    return model


if __name__ == "__main__":
    from tests import conftest as conftest  # what torchvision needs

    for name, make in CASES.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True)
        make(folder)
        print(name)
