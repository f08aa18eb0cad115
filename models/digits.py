"""Scikit-learn's handwritten digits, as data for the model files beside this one.

1,797 labelled images of 8 x 8 pixels. They are part of scikit-learn (`pip install scikit-learn`), so nothing is
downloaded. This is not a model file: if you copy `resnet.py` or `vdit.py`, copy `digits.py` into the same folder, where
`jshard train` looks for a model file's imports.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jshard.data import Data, DataError

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)  # height, width, channels
HELD_OUT = 320
_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Digits:
    """One part of the digits: sample `i` is {"image": float32 (size, size, channels), "label": int32}.

    The pixels have zero mean and unit variance. The held-out digits are always the same ones, drawn once from all.

    Attributes:
        part: "train" (1,477 images) or "held_out" (320).
        size: height and width; a multiple of 8 shows each pixel as a square of them.
        channels: how often the single channel is repeated.
        shift: each image is moved by up to this many of its 8 pixels in either direction, vertically and horizontally,
            depending on the seed and `i`; the uncovered pixels are empty.
        copies: number of copies of each image, each moved differently.
        seed: of the moves.
    """

    part: str
    size: int = 8
    channels: int = 1
    shift: int = 0
    copies: int = 1
    seed: int = 0

    def __len__(self) -> int:
        return self.copies * len(_parts()[self.part][1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        images, labels = _parts()[self.part]
        image, label = images[index % len(labels)], labels[index % len(labels)]
        if self.shift:
            rng = np.random.default_rng((self.seed, index))
            image = _moved(image, *rng.integers(-self.shift, self.shift + 1, 2))
        times = self.size // image.shape[0]
        image = image.repeat(times, axis=0).repeat(times, axis=1).repeat(self.channels, axis=2)
        return {"image": (image - _MEAN) / _STD, "label": label}


def digits(*, size: int = 8, channels: int = 1, shift: int = 0, copies: int = 1, seed: int = 0) -> Data:
    """The digits as `data(recipe)` of a model file returns them; the held-out ones are never moved."""
    train = Digits("train", size, channels, shift, copies, seed)
    held_out = Digits("held_out", size, channels)
    moved = f" ({copies} x, moved by up to {shift} px)" if shift else ""
    return Data(
        train=train,
        held_out=held_out,
        description=f"handwritten digits of scikit-learn: {len(_parts()['train'][1]):,} to train on{moved}, "
        f"{len(held_out):,} held out",
        fingerprint=f"sklearn digits, split {_SPLIT_SEED}, {train}",
    )


@dataclasses.dataclass(frozen=True)
class Clips:
    """Digits that cross an empty canvas at constant velocity and bounce off its edges; on one of their size, they rest.

    Sample `i` shows digit `i % digits`. Its start, its motion and the seed of its noise depend only on the part and
    `i`: there are `copies` of each digit, so training sees each with many noises, and the held-out samples always
    have the same noise.
    """

    part: str
    shape: tuple[int, int, int, int]
    copies: int = 1

    def __len__(self) -> int:
        return self.copies * len(Digits(self.part))

    def __getitem__(self, index: int) -> dict[str, Any]:
        digits = Digits(self.part)
        digit = digits[index % len(digits)]
        rng = np.random.default_rng((self.part == "held_out", index))
        height, width, _ = IMAGE_SHAPE
        room_2 = np.array([self.shape[1] - height, self.shape[2] - width])
        start_2, velocity_2 = rng.uniform(0, room_2), rng.uniform(-2, 2, 2)
        video_TYXC = np.full(self.shape, digit["image"].min(), np.float32)
        for t, frame_YXC in enumerate(video_TYXC):
            y, x = bounced(start_2 + t * velocity_2, room_2)
            frame_YXC[y : y + height, x : x + width] = digit["image"]
        return {"video": video_TYXC, "label": digit["label"], "seed": rng.integers(2**32, dtype=np.uint32)}


def bounced(way_2: np.ndarray, room_2: np.ndarray) -> np.ndarray:
    """The position after a distance travelled between two walls, in whole pixels."""
    there_and_back_2 = np.maximum(2 * room_2, 1)
    return (room_2 - np.abs(way_2 % there_and_back_2 - room_2)).round().clip(0).astype(int)


def clips(shape: tuple[int, int, int, int]) -> Data:
    """Clips of a shape as `data(recipe)` of a model file returns them: the same digit in all channels."""
    train, held_out = Clips("train", shape, copies=1000), Clips("held_out", shape)
    size = " x ".join(map(str, shape))
    return Data(
        train=train,
        held_out=held_out,
        description=f"moving digits of scikit-learn, {size}: {len(train):,} to train on, {len(held_out):,} held out",
        fingerprint=f"moving sklearn digits {size}, copies {train.copies}",
    )


# Of the pixels of all images, in the range 0 to 1.
_MEAN, _STD = np.float32(0.3053), np.float32(0.3760)


def _moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    height, width, _ = image.shape
    margin = max(abs(down), abs(right))
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)))
    return padded[margin - down :, margin - right :][:height, :width]


@functools.cache
def _parts() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (pixels 0 to 1) and labels of both parts; read once per process."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "The digits need the package scikit-learn.",
            where="digits.py",
            why="the images are part of it, and it is not installed.",
            do="pip install scikit-learn  # or 'jshard[digits]'",
        ) from error
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = (pixels.reshape(-1, *IMAGE_SHAPE) / 16).astype(np.float32)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    return {"train": (images[train], labels[train]), "held_out": (images[held_out], labels[held_out])}
