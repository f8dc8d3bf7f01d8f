"""Sizes and times, written for people."""

import pytest

from actckpt._text.sizes import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB"), (2**41, "2.00 TiB")]
)
def test_bytes_are_written_with_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
    assert parse_bytes(text, what="size") == nbytes


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (2e-5, "20.00 us"), (0.02, "20.00 ms"), (90.0, "90.00 s")])
def test_seconds_are_written_with_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_all_units_are_read() -> None:
    assert [parse_bytes(f"2 {unit}", what="size") for unit in ("B", "KB", "mib", "GB", "GiB", "TB", "TiB")] == [
        *(2, 2000, 2**21, 2 * 10**9, 2**31, 2 * 10**12, 2**41)
    ]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("4 Gb", r"'Gb' are bits\. Did you mean '4GiB' or '4GB'\?$"),
        ("4Gib", r"'Gib' are bits\. Did you mean '4GiB' or '4GB'\?$"),
        ("2Mb", r"'Mb' are bits\. Did you mean '2MiB' or '2MB'\?$"),
        ("4G", r"'500MB'\. Did you mean '4GiB' or '4GB'\?$"),
    ],
)
def test_a_unit_of_bits_is_not_taken_for_one_of_bytes(size: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^host_limit='{size}' is not a size.*{words}"):
        parse_bytes(size, what="host_limit")


def test_units_in_small_letters_are_bytes() -> None:
    assert [parse_bytes(f"2{unit}", what="size") for unit in ("gb", "gib", "kB", "KB", "b")] == [
        *(2 * 10**9, 2**31, 2000, 2000, 2)
    ]
