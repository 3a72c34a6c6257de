"""A feature pyramid (Lin et al., 2017, arXiv 1612.03144) over the maps that a backbone's `features` returns."""

from collections.abc import Sequence

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn.conv import Conv2d
from eqzoo.nn.resize import resize_nearest


class FeaturePyramid(eqx.Module):
    """Gives every map the same channels and what the smaller maps know, which flows down from the smallest.

    maps = model.features(image)
    pyramid = nn.FeaturePyramid([each.shape[-1] for each in maps], 256, key=key)
    levels = pyramid(maps)
    """

    lateral: tuple[Conv2d, ...]
    smooth: tuple[Conv2d, ...]

    def __init__(self, in_channels: Sequence[int], out_channels: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, (len(in_channels), 2))
        self.lateral = tuple(
            Conv2d(each, out_channels, 1, key=pair[0]) for each, pair in zip(in_channels, keys, strict=True)
        )
        self.smooth = tuple(Conv2d(out_channels, out_channels, 3, padding=1, key=pair[1]) for pair in keys)

    def __call__(self, maps: tuple[Float[Array, "_ _ _"], ...]) -> tuple[Float[Array, "_ _ out"], ...]:
        """From the largest map to the smallest, each at its own size."""
        if len(maps) != len(self.lateral):
            raise ValueError(
                f"FeaturePyramid: got {len(maps)} maps, but was made for {len(self.lateral)}; pass as many"
            )
        above, levels = None, []
        for x, lateral, smooth in zip(reversed(maps), reversed(self.lateral), reversed(self.smooth), strict=True):
            y = lateral(x)
            above = y if above is None else y + resize_nearest(above, y.shape[:2])
            levels.append(smooth(above))
        return tuple(reversed(levels))
