"""Sets of CPU or node numbers as the kernel writes them: `0-3,8` (list) and `00000000,0000010f` (map)."""

from collections.abc import Iterable

from numadist.errors import TopologyError


def parse_list(text: str) -> tuple[int, ...]:
    """Sorted numbers of a kernel list such as `0-3,8`; the empty text is the empty set.

    Raises: TopologyError.
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise TopologyError(f"{text.strip()!r} is not a CPU list: {part!r} (example: 0-3,8)")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def parse_map(text: str) -> tuple[int, ...]:
    """Sorted numbers of a kernel bit map: 32-bit hex words, most significant first. Raises: TopologyError."""
    # All words but the first are padded to eight digits, so joining them keeps the bit positions.
    words = text.strip().split(",")
    try:
        bits = int("".join([words[0], *(w.zfill(8) for w in words[1:])]) or "0", 16)
    except ValueError:
        raise TopologyError(f"{text.strip()!r} is not a CPU bit map (example: 00000000,0000010f)") from None
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)


def format_list(numbers: Iterable[int]) -> str:
    """The shortest kernel list of a set: `0-3,8`; the empty set is the empty text."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
