"""Kernel lists and bit maps."""

import pytest

from numadist.errors import TopologyError
from numadist.topology.cpuset import format_list, parse_list, parse_map


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("0", (0,)),
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("8,0-1\n", (0, 1, 8)),
        ("3-3", (3,)),
        ("0,250-251", (0, 250, 251)),
    ],
)
def test_list_is_read(text, numbers):
    assert parse_list(text) == numbers


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1-", "0,,2", "0x3", ","])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(TopologyError, match="is not a CPU list"):
        parse_list(text)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", ()),
        ("00000000,0000010f", (0, 1, 2, 3, 8)),
        ("00000001,00000000", (32,)),
        ("0000,00000000,00000000,02000200", (9, 25)),  # a short first word, as on a 112-CPU kernel
        ("1,80000000,00000001\n", (0, 63, 64)),
    ],
)
def test_map_is_read(text, numbers):
    assert parse_map(text) == numbers


def test_what_is_no_map_is_refused():
    with pytest.raises(TopologyError, match="is not a CPU bit map"):
        parse_map("zz")


@pytest.mark.parametrize("numbers", [(), (5,), (0, 1, 2, 3), (0, 2, 4), (0, 1, 7, 8, 9, 250)])
def test_format_is_the_inverse_of_parse(numbers):
    assert parse_list(format_list(numbers)) == numbers


def test_format_joins_runs_and_sorts():
    assert format_list([9, 0, 1, 2, 8, 2]) == "0-2,8-9"
