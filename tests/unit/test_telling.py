"""Progress is told where numarun says, by rank 0, and leaves other lines whole."""

import os
import threading
import time

import pytest

import numadist.config
from numadist import progress as module
from numadist.launch.environment import progress_place
from numadist.launch.options import parse
from numadist.launch.output import Stream, sinks
from numadist.progress import progress

LIMIT_S = 60.0


@pytest.fixture
def tell(monkeypatch):
    """Tell at once, and again only when the phase ends; returns what sets the place."""
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    monkeypatch.setattr(module, "LINE_S", LIMIT_S)
    monkeypatch.setattr(module, "BAR_S", 0.01)

    def at(place):
        monkeypatch.setattr(numadist.config, "_config", numadist.config.Config(progress=place))

    return at


def until(read, wanted: str) -> str:
    seen, deadline = "", time.monotonic() + LIMIT_S
    while wanted not in seen and time.monotonic() < deadline:
        seen += read()
        time.sleep(0.01)
    assert wanted in seen
    return seen


def test_a_line_tells_what_is_done_of_how_much(tell, capfd):
    tell("lines")
    with progress("loading weights", 8.0, "MB") as advance:
        seen = until(lambda: capfd.readouterr().err, "\n")
    assert seen == "loading weights: 0/8 MB\n"
    teller = module._Teller("lines", "loading weights", 8.0, "MB")
    teller.advance(2.0)
    teller.begin = time.monotonic() - 30
    assert teller.text() == "loading weights: 2/8 MB, 90 s left"
    assert (teller.bar(8), module._Teller("lines", "x", 0, "").bar(8)) == ("[##......] ", "")
    assert callable(advance)


def test_a_phase_of_unknown_length_tells_its_time(tell, capfd):
    tell("lines")
    with progress("capturing the model"), progress("something inside"):
        assert until(lambda: capfd.readouterr().err, "\n") == "capturing the model: 0 s\n"


@pytest.mark.parametrize("silence", ["nowhere", "short"])
def test_nothing_is_told_unasked_or_of_what_is_short(tell, capfd, monkeypatch, silence):
    tell("" if silence == "nowhere" else "lines")
    monkeypatch.setattr(module, "SILENT_S", LIMIT_S)
    before = threading.active_count()
    with progress("capturing the model", 3, "parts") as advance:
        advance(1)
        assert threading.active_count() == before + (silence == "short")
    assert threading.active_count() == before
    assert capfd.readouterr() == ("", "")


def test_a_failure_inside_goes_on_and_ends_the_telling(tell, capfd):
    tell("lines")
    with pytest.raises(KeyError), progress("compiling", 3, "parts"):
        raise KeyError
    with progress("compiling", 2, "parts"):
        assert "compiling: 0/2 parts" in until(lambda: capfd.readouterr().err, "0/2 parts\n")


@pytest.fixture
def terminal():
    """A function that reads what a terminal shows, and its name."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)

    def read() -> str:
        try:
            return os.read(ours, 1 << 16).decode()
        except BlockingIOError:
            return ""

    yield read, os.ttyname(theirs), theirs
    os.close(theirs)
    os.close(ours)


def test_a_bar_grows_and_goes(tell, terminal):
    read, name, _ = terminal
    tell(name)
    with progress("compiling", 4, "parts") as advance:
        until(read, "compiling: 0/4 parts")
        advance(2)
        until(read, "#.")
    assert until(read, "\r\x1b[K").endswith("\r\x1b[K"), "nothing of it is left"


def test_a_terminal_that_is_gone_stops_nothing(tell):
    tell("/dev/pts/no such terminal")
    with progress("compiling", 4, "parts") as advance:
        advance(4)


def test_a_line_of_a_rank_takes_the_place_of_the_bar(terminal, monkeypatch):
    read, name, fd = terminal
    monkeypatch.setattr(module.os, "isatty", lambda of: of in (1, 2))
    monkeypatch.setattr(module.os, "ttyname", lambda of: name)
    sink = sinks(name)[2]
    sink.fd = fd
    stream = Stream("[r1] ", sink, None)
    os.write(stream.write_fd, b"one\ntwo\n")
    stream.read_some()
    sink.write_some()
    stream.close_write_end()
    stream.close()
    assert until(read, "two") == "\x1b[K[r1] one\r\n[r1] two\r\n"


@pytest.mark.parametrize(
    ("words", "inherited", "place"),
    [
        ((), {}, "lines"),
        (("--quiet",), {}, ""),
        (("--quiet",), {"NUMADIST_PROGRESS": "lines"}, "lines"),
        (("--quiet", "--env", "NUMADIST_PROGRESS=auto"), {}, "lines"),
        ((), {"NUMADIST_PROGRESS": ""}, ""),
    ],
)
def test_numarun_says_where(capfd, words, inherited, place):
    assert progress_place(inherited, parse([*words, "script.py"])) == place
