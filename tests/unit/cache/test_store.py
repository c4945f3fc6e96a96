"""An entry is whole or not there: whoever writes it, whenever that one is killed, whatever lies in the folder."""

import logging
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from numadist.cache import store
from numadist.cache.store import Store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / "deep" / "cache"


def payload(number, size=200_000):
    """Recognisable whole, and in no part."""
    return number.to_bytes(4, "little") * (size // 4)


def test_what_was_written_last_is_read(folder):
    cache = Store(folder)
    assert cache.read("a") is None
    cache.write("a", b"one")
    cache.write("a", b"two")
    cache.write("b", b"")
    assert cache.read("a") == b"two"
    assert cache.read("b") == b""
    assert [p.name for p in sorted(folder.iterdir())] == ["a.entry", "b.entry"]


def test_an_entry_cut_at_any_length_or_changed_anywhere_is_none(folder, caplog):
    caplog.set_level(logging.DEBUG, "numadist")
    cache = Store(folder)
    cache.write("a", b"a payload of some bytes")
    file = folder / "a.entry"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert cache.read("a") is None, f"cut at {length}"
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.read("a") is None, f"changed at {place}"
    file.write_bytes(whole + b"x")
    assert cache.read("a") is None
    assert "is torn or changed" in caplog.text
    assert "is no entry of this version" in caplog.text
    cache.write("a", b"again")
    assert cache.read("a") == b"again"


WRITER = """
import sys
from pathlib import Path
from numadist.cache.store import Store
cache, number = Store(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
while True:
    cache.write("a", number.to_bytes(4, "little") * 50_000)
    number += 2
"""


def writer(folder, number):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(number)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def check_whole(found):
    assert found is not None
    assert len(found) == 200_000
    assert found == found[:4] * 50_000


def test_killed_while_writing_it_leaves_the_one_before_or_the_new_one(folder):
    cache, chance = Store(folder), random.Random(1)
    cache.write("a", payload(0))
    for number in range(100):
        process = writer(folder, number)
        try:
            time.sleep(chance.uniform(0, 0.005))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        check_whole(cache.read("a"))


def test_two_writers_and_a_reader_at_once(folder):
    cache = Store(folder)
    cache.write("a", payload(0))
    writers = [writer(folder, 0), writer(folder, 1)]
    try:
        odd_and_even = set()
        for _ in range(300):
            found = cache.read("a")
            check_whole(found)
            odd_and_even.add(found[0] % 2)
    finally:
        for process in writers:
            process.kill()
            process.communicate()
    assert odd_and_even <= {0, 1}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(folder, caplog, mode):
    cache = Store(folder)
    cache.write("a", b"one")
    folder.chmod(mode)
    assert cache.read("a") is None
    cache.write("a", b"two")
    with cache.claimed("a", 0):
        pass
    assert caplog.text.count(f"the cache folder {folder} is not used: it can be written by other users") == 1
    folder.chmod(0o755)
    assert cache.read("a") == b"one", "nothing was written"


def test_an_entry_that_others_can_write_to_is_refused(folder, caplog):
    cache = Store(folder)
    cache.write("a", b"one")
    (folder / "a.entry").chmod(0o666)
    assert cache.read("a") is None
    assert f"{folder} is not used: a.entry in it can be written by other users" in caplog.text
    cache.write("a", b"two")
    assert cache.read("a") == b"two"


def test_a_folder_of_another_user_is_refused(folder, caplog, monkeypatch):
    cache = Store(folder)
    cache.write("a", b"one")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert cache.read("a") is None
    assert f"{folder} is not used: it belongs to user {user}" in caplog.text


def test_a_link_in_the_place_of_an_entry_is_not_followed(folder, tmp_path):
    cache = Store(folder)
    cache.write("a", b"one")
    (folder / "b.entry").symlink_to(folder / "a.entry")
    assert cache.read("b") is None
    cache.write("b", b"two")
    assert cache.read("a") == b"one"


def test_a_file_in_the_place_of_the_folder_is_a_miss(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Store(tmp_path / "file")
    cache.write("a", b"one")
    assert cache.read("a") is None


def test_what_was_not_used_for_longest_goes_first(folder):
    cache = Store(folder, limit_bytes=2500)
    for number, name in enumerate("abc"):
        cache.write(name, bytes(1000) if name != "c" else b"")
        os.utime(folder / f"{name}.entry", (number, number))
    assert cache.read("a") is not None, "which makes it the one used last"
    cache.write("d", bytes(1000))
    assert [name for name in "abcd" if cache.read(name) is not None] == ["a", "c", "d"]


def test_what_a_killed_writer_left_goes_after_a_while(folder):
    cache = Store(folder)
    cache.write("a", b"one")
    for name, age in (("old", 2 * store._ABANDONED_S), ("new", 0)):
        (folder / f".{name}").write_bytes(b"part")
        os.utime(folder / f".{name}", (time.time() - age,) * 2)
    cache.write("a", b"two")
    assert sorted(p.name for p in folder.iterdir()) == [".new", "a.entry"]


HOLDER = """
import sys, time
from pathlib import Path
from numadist.cache.store import Store
with Store(Path(sys.argv[1])).claimed("a", 0):
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_claim_ends_with_its_process_and_nobody_waits_longer_than_told(folder):
    cache = Store(folder)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        with cache.claimed("a", 0.1):
            assert holder.poll() is None, "it holds the lock still"
        with cache.claimed("b", 1000):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with cache.claimed("a", 1000):
        pass
