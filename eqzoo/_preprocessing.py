"""What upstream does to an image before it evaluates a checkpoint, with PIL's resizing, as upstream's."""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float32, UInt8

from eqzoo._facts import timm_facts, torchvision_facts
from eqzoo._types import check_choices
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.hub import fetch_config

Mode = Literal["cover", "fit", "stretch"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resizes, crops and normalises one image as upstream evaluates: `np.stack([prepare(image) for image in images])`.

    `resize` is (height, width): "cover" and "fit" keep the aspect ratio, the image filling it or lying within it;
    "stretch" doesn't. `crop` is taken from the centre; where the image is smaller, "fit" pads with the mean, the others
    with black; None leaves the image whole, so that each comes out in its own size. `mean` and `std` are for values
    from 0 to 1; a single one each makes the image grey. `upstream` decides which way half a pixel is rounded;
    transformers lays transparent images on white, the others drop transparency.
    """

    resize: tuple[int, int]
    resize_mode: Mode
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
    crop: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    upstream: Literal["torchvision", "timm", "transformers"]

    def __post_init__(self):
        check_choices(self)
        if not all(isinstance(side, int) and side > 0 for side in self.resize + (self.crop or ())):
            raise ValueError(f"resize={self.resize} and crop={self.crop} must be positive whole numbers of pixels")
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3) or 0 in self.std:
            raise ValueError(f"mean={self.mean} and std={self.std} must have 1 or 3 numbers each, and no std of 0")

    def __repr__(self) -> str:
        lines = [f"    {field.name}={getattr(self, field.name)!r},\n" for field in dataclasses.fields(self)]
        return f"Preprocessing(\n{''.join(lines)})"

    def __call__(self, image: Any) -> Float32[np.ndarray, "height width channels"]:
        """`image` is a PIL image or a uint8 array: "height width" if grey, "height width channels" if RGB or RGBA."""
        pil = _pil()
        picture = image if isinstance(image, pil.Image) else pil.fromarray(_pixels(image))
        picture = self._in_colour(picture, pil)
        width, height = picture.size
        rows, columns = self._resized(height, width)
        picture = picture.resize((columns, rows), pil.Resampling[self.interpolation.upper()])

        if self.crop is not None:
            rows, columns, picture = *self.crop, self._cropped(picture, self.crop, pil)
        pixels = np.asarray(picture, np.float32).reshape(rows, columns, len(self.mean)) / np.float32(255)
        return (pixels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)

    def _in_colour(self, picture: Any, pil: Any) -> Any:
        if self.upstream == "transformers" and ("A" in picture.getbands() or "transparency" in picture.info):
            white = pil.new("RGBA", picture.size, "white")
            picture = pil.alpha_composite(white, picture.convert("RGBA"))
        return picture.convert("RGB" if len(self.mean) == 3 else "L")

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.resize
        if self.resize_mode == "stretch":
            return rows, columns
        if self.resize_mode == "cover" and rows == columns:  # all upstreams round the longer side down here
            shorter = min(height, width)
            return int(rows * height / shorter), int(rows * width / shorter)
        ratio = (min if self.resize_mode == "cover" else max)(height / rows, width / columns)
        return round(height / ratio), round(width / ratio)

    def _cropped(self, picture: Any, crop: tuple[int, int], pil: Any) -> Any:
        (width, height), (rows, columns) = picture.size, crop
        fill = tuple(round(255 * value) if self.resize_mode == "fit" else 0 for value in self.mean)
        canvas = pil.new(picture.mode, (columns, rows), fill if len(fill) == 3 else fill[0])
        canvas.paste(picture, (-self._offset(width - columns), -self._offset(height - rows)))
        return canvas

    def _offset(self, surplus: int) -> int:
        """Where the crop begins in an image that is larger than it by `surplus` pixels."""
        if self.upstream == "transformers":
            return surplus // 2
        return round(surplus / 2) if surplus > 0 else -(-surplus // 2)


def preprocessing(
    source: str | os.PathLike, *, image_size: int | None = None, revision: str | None = None
) -> Preprocessing:
    """The transform upstream evaluates `source` with: `torchvision/NAME.WEIGHTS`, a hub id, or a local folder.

    Knows torchvision's presets for classification and for segmentation (which doesn't crop), timm's configs, and
    transformers' image processors of ViT, DeiT, ConvNeXt, BiT and CLIP (in their PIL form). `image_size` changes the
    crop's sides and, in proportion, the resizing; without a crop, the shorter side.
    """
    name = os.fspath(source)
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size={image_size} must be a positive number of pixels")
    if isinstance(source, str) and not Path(name).exists():
        if name.startswith("torchvision/"):
            if revision is not None:
                raise ValueError(f"revision={revision!r} was given, but torchvision's weights have none: leave it out")
            return _from_torchvision(name.removeprefix("torchvision/"), image_size)
        known = timm_facts().get(name.removeprefix("timm/")) if name.startswith("timm/") else None
        if known is not None and revision is None:
            return _from_timm(known["preprocessing"], image_size)
    folder = fetch_config(source, revision=revision)
    if folder.is_file():
        raise ValueError(
            f"{name} is a file, which holds no preprocessing; pass the folder with its config.json, or the name it was "
            f'published by, such as "timm/resnet50.a1_in1k"'
        )
    return _from_folder(folder, name, image_size)


def _from_torchvision(weights: str, image_size: int | None) -> Preprocessing:
    facts = torchvision_facts()
    if weights not in facts:
        near = difflib.get_close_matches(weights, facts, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "write it as torchvision/resnet50.IMAGENET1K_V2"
        raise ValueError(f"torchvision has no weights {weights!r}; {hint}")
    preset = facts[weights]["preprocessing"]
    crop, resize = preset["crop_size"] and _square(preset["crop_size"]), _square(preset["resize_size"])
    return Preprocessing(
        resize=_in_proportion(resize, crop or resize, image_size),
        resize_mode="cover",
        interpolation=preset["interpolation"],
        crop=_square(image_size) if crop and image_size else crop,
        mean=tuple(preset["mean"]),
        std=tuple(preset["std"]),
        upstream="torchvision",
    )


_TIMM_MODES: dict[str, Mode] = {"center": "cover", "border": "fit", "squash": "stretch"}


def _from_timm(config: Mapping[str, Any], image_size: int | None) -> Preprocessing:
    """From a `pretrained_cfg`; what it leaves out or empty is timm's default."""
    channels, *crop = config.get("input_size") or (3, 224, 224)
    mean = tuple(map(float, config.get("mean") or (0.485, 0.456, 0.406)))
    if channels != len(mean):
        raise CheckpointError(f"input_size={config['input_size']} has {channels} channels, but mean={mean} {len(mean)}")
    crop_mode = config.get("crop_mode") or "center"
    if crop_mode not in _TIMM_MODES:
        raise CheckpointError(f"crop_mode={crop_mode!r} is unknown; eqzoo knows {', '.join(_TIMM_MODES)}")
    height, width = _square(image_size) if image_size else crop
    crop_pct = config.get("crop_pct") or 0.875
    return Preprocessing(
        resize=(math.floor(height / crop_pct), math.floor(width / crop_pct)),
        resize_mode=_TIMM_MODES[crop_mode],
        interpolation=config.get("interpolation") or "bicubic",
        crop=(height, width),
        mean=mean,
        std=tuple(map(float, config.get("std") or (0.229, 0.224, 0.225))),
        upstream="timm",
    )


# What transformers' classes take an option to be that preprocessor_config.json leaves out.
_COMMON = {
    "do_resize": True,
    "do_center_crop": False,
    "do_pad": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "resample": 3,
    "default_to_square": False,
}
_CLIP = _COMMON | {
    "do_center_crop": True,
    "size": 224,
    "crop_size": 224,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_PROCESSORS = {
    "ViTImageProcessor": _COMMON | {"size": 224, "crop_size": None, "resample": 2, "default_to_square": True},
    "DeiTImageProcessor": _COMMON | {"do_center_crop": True, "size": 256, "crop_size": 224, "default_to_square": True},
    "ConvNextImageProcessor": _COMMON | {"size": 384, "crop_pct": 224 / 256},
    "BitImageProcessor": _CLIP,
    "CLIPImageProcessor": _CLIP,
}
_PROCESSOR_OF_MODEL = {
    "vit": "ViTImageProcessor",
    "swin": "ViTImageProcessor",
    "swinv2": "ViTImageProcessor",
    "deit": "DeiTImageProcessor",
    "convnext": "ConvNextImageProcessor",
    "convnextv2": "ConvNextImageProcessor",
    "resnet": "ConvNextImageProcessor",
    "regnet": "ConvNextImageProcessor",
    "dinov2": "BitImageProcessor",
    "clip": "CLIPImageProcessor",
}
# Options that change nothing for one image that has become RGB.
_WITHOUT_EFFECT = {
    "image_processor_type",
    "feature_extractor_type",
    "processor_class",
    "do_convert_rgb",
    "data_format",
    "input_data_format",
    "return_tensors",
    "device",
    "disable_grouping",
    "_valid_processor_keys",
}
_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by PIL's code


def _from_folder(folder: Path, name: str, image_size: int | None) -> Preprocessing:
    config, processor = _read_json(folder / "config.json"), _read_json(folder / "preprocessor_config.json")
    try:
        if "pretrained_cfg" in config:
            return _from_timm(config["pretrained_cfg"], image_size)
        if processor:
            return _from_transformers(processor, config.get("model_type"), image_size)
        if "architecture" in config:  # timm's older files have everything at the top
            return _from_timm(config, image_size)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{name}: its preprocessing cannot be taken over: {error}") from error
    raise CheckpointError(
        f"{name} describes no image preprocessing: it has neither a timm config.json (with pretrained_cfg) nor a "
        f"preprocessor_config.json"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object with named options")
    return content


def _from_transformers(stated: Mapping[str, Any], model_type: str | None, image_size: int | None) -> Preprocessing:
    """From a `preprocessor_config.json`; one without a type means the processor of the folder's model."""
    kind = stated.get("image_processor_type") or stated.get("feature_extractor_type") or ""
    kind = kind.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    kind = kind or _PROCESSOR_OF_MODEL.get(model_type or "", f"(none stated, for a model of type {model_type!r})")
    if kind not in _PROCESSORS:
        raise CheckpointError(f"image processor {kind} is unknown; eqzoo knows {', '.join(_PROCESSORS)}")
    given = {option: value for option, value in stated.items() if value is not None and option not in _WITHOUT_EFFECT}
    if unknown := [option for option in given if option not in _PROCESSORS[kind]]:
        raise CheckpointError(f"{kind} with {', '.join(f'{o}={given[o]!r}' for o in unknown)} is unknown to eqzoo")
    options = _PROCESSORS[kind] | given
    if not options["do_resize"] or options["do_pad"] or options["resample"] not in range(len(_RESAMPLE)):
        shown = ", ".join(f"{option}={options[option]!r}" for option in ("do_resize", "do_pad", "resample"))
        raise CheckpointError(f"{kind} with {shown} is unknown to eqzoo")

    resize, resize_mode = _transformers_size(options["size"], options["default_to_square"])
    if kind == "ConvNextImageProcessor":
        if resize_mode != "cover" or options["do_center_crop"]:
            shown = ", ".join(f"{option}={options[option]!r}" for option in ("size", "do_center_crop"))
            raise CheckpointError(f"{kind} with {shown} is unknown to eqzoo")
        side = image_size or resize[0]
        crop = resize = _square(side)
        resize_mode = "stretch"
        if side < 384:
            resize, resize_mode = _square(int(side / options["crop_pct"])), "cover"
    elif options["do_center_crop"]:
        crop, _ = _transformers_size(options["crop_size"], True)
        resize, crop = _in_proportion(resize, crop, image_size), _square(image_size) if image_size else crop
    elif resize_mode == "stretch":
        resize = crop = _square(image_size) if image_size else resize
    else:
        raise CheckpointError(f"{kind} with size={options['size']} and no crop leaves images of different sizes")

    # transformers normalises what it has rescaled, whatever the factor; `mean` and `std` are for values from 0 to 1.
    scale = 255 * (options["rescale_factor"] if options["do_rescale"] else 1)
    mean = options["image_mean"] if options["do_normalize"] else (0.0, 0.0, 0.0)
    std = options["image_std"] if options["do_normalize"] else (1.0, 1.0, 1.0)
    return Preprocessing(
        resize=resize,
        resize_mode=resize_mode,
        interpolation=_RESAMPLE[options["resample"]],
        crop=crop,
        mean=tuple(value / scale for value in mean),
        std=tuple(value / scale for value in std),
        upstream="transformers",
    )


def _transformers_size(size: int | Mapping[str, int], square: bool) -> tuple[tuple[int, int], Mode]:
    if isinstance(size, int):
        return _square(size), "stretch" if square else "cover"
    if set(size) == {"height", "width"}:
        return (size["height"], size["width"]), "stretch"
    if set(size) == {"shortest_edge"}:
        return _square(size["shortest_edge"]), "cover"
    raise CheckpointError(f"size={size} is unknown; eqzoo knows a number, height and width, and shortest_edge")


def _square(side: int) -> tuple[int, int]:
    return side, side


def _in_proportion(resize: tuple[int, int], crop: tuple[int, int], image_size: int | None) -> tuple[int, int]:
    """What to resize to so that a crop of `image_size` shows as much of the image as `crop` would."""
    if image_size is None:
        return resize
    return resize[0] * image_size // crop[0], resize[1] * image_size // crop[1]


def _pil() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("preparing images needs Pillow: pip install 'eqzoo[vision]'") from error
    return Image


def _pixels(image: Any) -> UInt8[np.ndarray, "height width *channels"]:
    if not isinstance(image, np.ndarray | jax.Array):
        raise TypeError(
            f"the image is a {type(image).__name__}, expected one PIL image or array; "
            f"of several make a batch: `np.stack([prepare(image) for image in images])`"
        )
    if image.dtype != np.uint8:
        raise ValueError(
            f"the image has dtype {image.dtype}, expected uint8 from 0 to 255 as it is read from a file; "
            f"from values between 0 and 1: `np.uint8(np.round(255 * image))`"
        )
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.size and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (3, 4))):
        return pixels
    raise ValueError(
        f"the image has shape {image.shape}, expected (height, width) or (height, width, channels) with 1, 3 or 4 "
        f"channels; from channels first: `np.moveaxis(image, 0, -1)`; of a batch prepare each image by itself"
    )
