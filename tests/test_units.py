import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxrecals.errors import LimitError
from fxrecals.units import (
    DeviceLimits,
    Limit,
    format_bytes,
    format_count,
    format_seconds,
    parse_limit,
)

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def exact(nbytes: int, unit_bytes: int) -> str:
    """`nbytes` as a decimal number of units, without rounding."""
    text = f"{Decimal(nbytes).scaleb(-len(str(unit_bytes)) + 1):f}"
    assert Fraction(text) * unit_bytes == nbytes
    return text


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (1, 1),
        (5_200_000_001, 5_200_000_001),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        (" 1.5  gib ", 3 * 2**29),
        (".5kB", 500),
        ("2.kb", 2000),
        ("1KiB", 1024),
        ("0.3 GB", 300_000_000),
        ("7 B", 7),
        ("1.9B", 1),
        ("1PiB", 2**50),
    ],
)
def test_bytes_are_read_as_written(written: int | str, nbytes: int) -> None:
    limit = parse_limit(written)
    assert limit.nbytes == nbytes
    assert limit.resolve(baseline_bytes=17) == nbytes


@given(st.integers(1, 10**20), st.sampled_from(sorted(DECIMAL)), st.sampled_from(["", " "]))
def test_every_number_of_bytes_survives_every_decimal_unit(
    nbytes: int, unit: str, gap: str
) -> None:
    assert parse_limit(f"{exact(nbytes, DECIMAL[unit])}{gap}{unit}").nbytes == nbytes


@given(st.integers(1, 10**6), st.sampled_from(sorted(BINARY)))
def test_binary_units_are_powers_of_1024(count: int, unit: str) -> None:
    assert parse_limit(f"{count}{unit}").nbytes == count * BINARY[unit]


@given(st.integers(1, 10**20))
def test_an_int_is_bytes(nbytes: int) -> None:
    assert parse_limit(nbytes) == Limit(format_bytes(nbytes), nbytes=nbytes)


@given(st.integers(1, 10**6), st.integers(0, 10**18))
def test_a_share_is_exact_and_rounded_down(millionths: int, baseline_bytes: int) -> None:
    limit = parse_limit(f"{Decimal(millionths).scaleb(-4):f}%")
    assert limit.share == Fraction(millionths, 10**6)
    assert limit.resolve(baseline_bytes) == millionths * baseline_bytes // 10**6


def test_all_of_the_peak_is_a_share_too() -> None:
    assert parse_limit("100%").resolve(12345678901234567) == 12345678901234567


def test_auto_asks_for_the_free_memory_only_when_resolved() -> None:
    asked: list[int] = []

    def free() -> int:
        asked.append(1)
        return 700

    limit = parse_limit("Auto")
    assert not asked
    assert limit.resolve(1000, free) == 700
    assert parse_limit("50%").resolve(1000, free) == 500
    assert asked == [1]


def test_auto_with_less_than_nothing_free_allows_nothing() -> None:
    assert parse_limit("auto").resolve(1000, lambda: -5) == 0


def test_auto_without_anyone_to_ask_says_what_to_write() -> None:
    with pytest.raises(LimitError, match=r"limit='auto' .*4GB"):
        parse_limit("auto").resolve(1000)


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("6", '"6GB" or "6%"'),
        ("4000000000", '"6GB" or "50%"'),
        (0.5, '"50%"'),
        (1.0, '"100%"'),
        (4e9, "an int of bytes, as in 4000000000"),
        (2.5, "bytes as an int"),
        (math.nan, "bytes as an int"),
        (math.inf, "bytes as an int"),
        (-0.5, "bytes as an int"),
        (True, "bytes as an int"),
        (None, "bytes as an int"),
        (b"4GB", "bytes as an int"),
        (["4GB"], "bytes as an int"),
        (0, "at least one byte"),
        (-1, "at least one byte"),
        ("0GB", "at least one byte"),
        ("0.1B", "at least one byte"),
        ("-4GB", "bytes as an int"),
        ("4e9", "bytes as an int"),
        ("4G", "the units B, kB, MB, GB"),
        ("4 gigs", "the units"),
        ("", "bytes as an int"),
        ("GB", "bytes as an int"),
        ("1,5GB", "bytes as an int"),
        ("4GB 2", "bytes as an int"),
        ("\u0664GB", "bytes as an int"),
        ("9" * 5000 + "GB", "bytes as an int"),
        ("0%", "over 0%"),
        ("101%", "at most 100%"),
        ("100.0000001%", "at most 100%"),
    ],
)
def test_what_is_not_a_limit_is_refused_with_what_would_work(written: object, hint: str) -> None:
    with pytest.raises(LimitError) as caught:
        parse_limit(written)  # pyright: ignore
    assert caught.value.argument == "limit"
    assert hint in caught.value.expected
    assert hint in str(caught.value)


def test_a_limit_that_was_read_before_is_returned_as_it_is() -> None:
    one, many = parse_limit("4GB"), parse_limit({"cpu": "4GB"})
    assert parse_limit(one) is one
    assert parse_limit(many) is many
    assert parse_limit({"cpu": one}) == many


def test_limits_by_device_are_read_each_by_itself() -> None:
    limits = parse_limit({"cuda:1": "50%", "cuda:0": 7, "cpu": "auto"})
    assert isinstance(limits, DeviceLimits)
    assert [device for device, _ in limits.limits] == ["cuda:1", "cuda:0", "cpu"]
    found = limits.resolve({"cuda:1": 9}, available_bytes=lambda device: len(device))
    assert found == {"cuda:1": 4, "cuda:0": 7, "cpu": 3}
    assert str(limits) == "cuda:1: 50%, cuda:0: 7 B, cpu: auto"


def test_a_share_of_a_device_that_is_not_used_is_nothing() -> None:
    assert parse_limit({"cuda:1": "50%"}).resolve({}) == {"cuda:1": 0}


def test_a_device_may_be_named_by_an_object_that_prints_as_one() -> None:
    class Device:
        def __str__(self) -> str:
            return "cuda:0"

    assert parse_limit({Device(): "1kB"}).resolve({}) == {"cuda:0": 1000}  # pyright: ignore
    with pytest.raises(LimitError, match="each once"):
        parse_limit({Device(): "1kB", "cuda:0": "1kB"})  # pyright: ignore


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, r"limit=\{\} .* a dict with a device in it"),
        ({"": "4GB"}, "each once"),
        ({0: "4GB"}, "each once"),
        ({"cuda:0": "6"}, r"limit\['cuda:0'\]='6' .*6GB"),
        ({"cuda:0": {"cuda:0": "6GB"}}, r"limit\['cuda:0'\]=\{"),
    ],
)
def test_a_bad_limit_by_device_names_the_device(written: object, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        parse_limit(written)  # pyright: ignore


def test_a_limit_prints_as_it_was_written() -> None:
    assert [str(parse_limit(text)) for text in (" 4 GB", "35%", "AUTO")] == ["4 GB", "35%", "auto"]
    assert str(parse_limit(5_200_000_001)) == "5.20 GB"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1005, "1.00 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (999_999_999, "1.00 GB"),
        (12_345_678, "12.3 MB"),
        (123_456_789_012, "123 GB"),
        (10**15, "1.00 PB"),
        (12_345 * 10**15, "12300 PB"),
        (-1500, "-1.50 kB"),
    ],
)
def test_bytes_print_with_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 10**20))
def test_printed_bytes_are_within_half_a_percent_and_can_be_read_again(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    printed = Fraction(number) * DECIMAL[unit]
    assert abs(printed - nbytes) * 200 <= nbytes
    assert printed == 0 or parse_limit(format_bytes(nbytes)).nbytes == printed


@given(st.integers(0, 10**20), st.integers(0, 10**20))
def test_more_bytes_never_print_as_less(a: int, b: int) -> None:
    def read(nbytes: int) -> Fraction:
        number, unit = format_bytes(nbytes).split()
        return Fraction(number) * DECIMAL[unit]

    assert read(min(a, b)) <= read(max(a, b))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-11, "0.0100 ns"),
        (1e-9, "1.00 ns"),
        (999.9e-9, "1.00 us"),
        (0.00123, "1.23 ms"),
        (1, "1.00 s"),
        (59.94, "59.9 s"),
        (90, "1.50 min"),
        (7200, "2.00 h"),
        (-0.5, "-500 ms"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_seconds_print_with_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_999, "1.00 M"), (3 * 10**15, "3.00 P")],
)
def test_counts_print_with_three_digits_and_a_letter(count: int, text: str) -> None:
    assert format_count(count) == text
