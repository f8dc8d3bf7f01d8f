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


def test_all_units_are_read_also_in_small_letters() -> None:
    units = {"B": 1, "b": 1, "KB": 1000, "kB": 1000, "mib": 2**20, "GB": 10**9, "gb": 10**9, "GiB": 2**30, "gib": 2**30}
    for unit, nbytes in (units | {"TB": 10**12, "TiB": 2**40}).items():
        assert parse_bytes(f"2 {unit}", what="size") == parse_bytes(f"2{unit}", what="size") == 2 * nbytes


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
