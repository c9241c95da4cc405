"""Rotation tables and the rotation, against their formulas one entry at a time."""

from __future__ import annotations

import cmath
import math

import torch

from cute_kernels.reference.rope import cos_sin_table, frequencies, rotate


def test_plain_table() -> None:
    table = cos_sin_table(300, ratio=1)
    assert table.shape == (300, 64) and table.dtype == torch.float32
    for p in (0, 1, 17, 299):
        for i in range(32):
            angle = p / 10000 ** (2 * i / 64)
            assert abs(table[p, i].item() - math.cos(angle)) < 1e-7
            assert abs(table[p, 32 + i].item() - math.sin(angle)) < 1e-7


def test_compressed_layers_use_yarn() -> None:
    """Fast pairs keep their frequency, slow ones turn 16 times slower, those between are blended linearly."""
    f = frequencies(160000.0, yarn=True).tolist()
    base = 160000.0
    plain = [base ** (-2 * i / 64) for i in range(32)]
    first = math.floor(64 * math.log(65536 / (2 * math.pi * 32)) / (2 * math.log(base)))
    last = math.ceil(64 * math.log(65536 / (2 * math.pi * 1)) / (2 * math.log(base)))
    assert (first, last) == (15, 25)
    for i in range(32):
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        assert math.isclose(f[i], plain[i] / 16 * share + plain[i] * (1 - share), rel_tol=1e-14)
    assert f[:16] == frequencies(160000.0, yarn=False).tolist()[:16]
    for ratio in (4, 128):
        assert math.isclose(cos_sin_table(2, ratio=ratio)[1, 32 + 20].item(), math.sin(f[20]), rel_tol=1e-6)


def test_rotation_turns_neighbouring_pairs_and_leaves_the_rest() -> None:
    x, table = torch.randn(5, 3, 512), cos_sin_table(40)
    positions = torch.tensor([0, 1, 7, 20, 39])
    y = rotate(x, table[positions].unsqueeze(1))
    assert torch.equal(y[..., :448], x[..., :448])
    assert torch.equal(y[0], x[0])
    for n, p in enumerate(positions.tolist()):
        for j in range(32):
            turn = cmath.exp(1j * p / 10000 ** (2 * j / 64))
            want = complex(x[n, 2, 448 + 2 * j], x[n, 2, 449 + 2 * j]) * turn
            assert abs(complex(y[n, 2, 448 + 2 * j], y[n, 2, 449 + 2 * j]) - want) < 1e-6
