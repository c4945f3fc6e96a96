"""What users of torchrun type: accepted where it means something here, explained where it does not."""

import pytest

from numadist.launch.cli import main
from numadist.launch.options import UsageError, parse


@pytest.mark.parametrize(
    "option",
    [("--role", "x"), ("--local-addr", "h"), ("--monitor-interval", "1"), ("--numa-binding", "node")],
    ids=lambda pair: pair[0],
)
def test_accepted(option):
    assert parse([*option, "x.py"]).command == ("x.py",)


def test_auto_is_one_rank_per_numa_node():
    assert parse(["--nproc-per-node", "auto", "x.py"]).request == parse(["x.py"]).request


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tee", "3"], "--tee is torchrun's; .*--log-dir DIR"),
        (["--redirects=3"], "--redirects is torchrun's; --log-dir DIR writes files"),
        (["--nproc-per-node", "cpu"], "one rank per NUMA node where it is left out"),
        (["--master-port", "99999"], "from 0 to 65535, got '99999'"),
        (["--rdzv-endpoint", "[::1"], r"IPv6: \[::1\]:29500"),
    ],
)
def test_explained(words, said):
    with pytest.raises(UsageError, match=said):
        parse([*words, "x.py"])


def test_an_ipv6_endpoint_loses_its_brackets():
    options = parse(["--rdzv-endpoint", "[::1]:29511", "x.py"])
    assert (options.master_addr, options.master_port) == ("::1", 29511)


def test_python_in_front_of_the_script_is_hinted_at(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["python", "train.py"]) == 127
    assert "numarun starts Python itself: numarun train.py" in capsys.readouterr().err


def test_a_rank_that_is_not_there_is_no_filter(capsys):
    assert main(["--dry-run", "--nproc-per-node", "1", "--ranks", "5"]) == 2
    assert "--ranks 5: this machine's ranks are 0-0" in capsys.readouterr().err


def test_version(capsys):
    from numadist import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"numadist {__version__}\n"
