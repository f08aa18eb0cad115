"""Clicks drawn from a known law, so that the smallest possible loss is known: data for the model file `dhen.py`.

This is not a model file: if you copy `dhen.py`, copy `clicks.py` into the same folder, where `jshard train` looks
for a model file's imports.

Names end in the dims of their array:

    B  batch    C  categories    N  numbers of a sample
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jshard.data import Data


def uniform(*keys: int | np.ndarray) -> np.ndarray:
    """Numbers between 0 and 1, each a function of only its integer keys (splitmix64)."""
    x = np.zeros(1, np.uint64)
    for key in keys:
        x = x + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)) + 0.5) / 2.0**53


def normal(u: np.ndarray) -> np.ndarray:
    """Half as many normal numbers as there are uniform ones along the last dim (Box-Muller)."""
    u, v = np.split(u, 2, axis=-1)
    return np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)


def entropy(p: np.ndarray) -> float:
    """Mean entropy of Bernoulli variables with these probabilities, in nats."""
    return float(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean())


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Sample `i` is a function of only `i` and these settings.

    The ids of a category follow Zipf's law. Each id has its own effect and a taste, a vector of length two, which
    are the same in every sample; agreeing tastes of neighbouring categories make a click more likely, as does a
    weighted sum of the numbers. The sum of these terms is the logit of the click, which is then drawn.
    """

    rows: tuple[int, ...]
    num_numbers: int
    size: int
    part: int  # training and held-out samples differ in it, and share the law
    exponent: float = 1.5  # of Zipf's law

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample, _ = self.draw(np.array([index]))
        return {name: values[0] for name, values in sample.items()}

    def draw(self, index_B: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Samples by number, with the true probability of a click in each."""
        C, N = len(self.rows), self.num_numbers
        u_B = uniform(self.part, index_B[:, None], np.arange(C + 2 * N + 1))
        ids_BC, numbers_BN = self._zipf(u_B[:, :C]), normal(u_B[:, C:-1])
        p_B = 1 / (1 + np.exp(-self._logit(ids_BC, numbers_BN)))
        sample = {
            "ids": ids_BC.astype(np.int32),
            "numbers": numbers_BN.astype(np.float32),
            "click": (u_B[:, -1] < p_B).astype(np.float32),
        }
        return sample, p_B

    def _zipf(self, u_BC: np.ndarray) -> np.ndarray:
        """Ids whose frequency falls as (id + 1) ** -exponent; in closed form, so that no table is too large."""
        rows, power = np.array(self.rows), 1 - self.exponent
        ids = (1 + u_BC * ((rows + 1.0) ** power - 1)) ** (1 / power) - 1
        return np.minimum(ids.astype(np.int64), rows - 1)

    def _logit(self, ids_BC: np.ndarray, numbers_BN: np.ndarray) -> np.ndarray:
        law_BC3 = normal(uniform(np.arange(len(self.rows))[:, None], ids_BC[..., None], np.arange(6)))
        effect_BC, taste_BC2 = law_BC3[..., 0], law_BC3[..., 1:]
        agree_BC = (taste_BC2[:, :-1] * taste_BC2[:, 1:]).sum(-1)
        logit_B = np.full(len(ids_BC), -1.5)
        for part in (effect_BC, agree_BC, numbers_BN * self._weights):
            logit_B += part.sum(-1) / np.sqrt(part.shape[-1])
        return logit_B

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        return normal(uniform(np.arange(2 * self.num_numbers)))

    @functools.cached_property
    def bounds(self) -> tuple[float, float]:
        """The mean loss given the law (no model can do better), and given only the click rate."""
        _, p = self.draw(np.arange(min(self.size, 32_768)))
        return entropy(p), entropy(p.mean(keepdims=True))


def clicks(rows: tuple[int, ...], num_numbers: int, *, num_samples: int, num_held_out: int) -> Data:
    """The clicks as `data(recipe)` of a model file returns them, with the floor of the loss in their description."""
    train, held_out = (Clicks(rows, num_numbers, size, part) for part, size in enumerate((num_samples, num_held_out)))
    floor, base = held_out.bounds
    return Data(
        train=train,
        held_out=held_out,
        description=f"{len(train):,} generated samples, {len(held_out):,} held out. No model has a loss below "
        f"{floor:.4f}; the click rate alone gives {base:.4f} (normalised entropy: loss / {base:.4f}, at best "
        f"{floor / base:.3f})",
        fingerprint=repr((train, held_out)),
    )
