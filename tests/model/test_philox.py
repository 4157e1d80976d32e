"""The counter-based generator, against published vectors."""

from __future__ import annotations

import pytest

from worker.model.philox import philox4x32, uniform

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of the authors' Random123 distribution
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected  # type: ignore[arg-type]


def test_uniform_depends_on_every_part_of_its_key() -> None:
    keys = [(s, c, p) for s in (0, 1, 2**32, 2**63) for c in (0, 1, 7) for p in (0, 1, 2**20)]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_uniform_stays_below_one() -> None:
    numbers = [uniform(5, 0, i) for i in range(2000)]
    assert all(0.0 <= n < 1.0 for n in numbers)
    assert 0.47 < sum(numbers) / len(numbers) < 0.53
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
