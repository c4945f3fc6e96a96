"""The C++ tests of the core, built with each sanitizer: ranks are threads, so TSAN sees every shared word."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "numadist" / "csrc"

LIMIT_S = 900  # only a hang reaches it

SANITIZERS = {
    "plain": ["-O2"],
    "asan-ubsan": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-fsanitize=thread"],
}

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the native tests"),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "plain" else pytest.mark.slow) for name in SANITIZERS],
)
def build(request, tmp_path_factory):
    """build(name) -> path of tests/native/<name>.cpp compiled together with the core."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-pthread"]
    flags += [*SANITIZERS[request.param], f"-I{CSRC}"]
    sources = sorted(CSRC.rglob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    jobs = [
        subprocess.Popen(["g++", *flags, "-c", str(source), "-o", str(target)])
        for source, target in zip(sources, objects, strict=True)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs), f"the core does not build with {flags}"

    def build_test(name: str) -> Path:
        program = folder / name
        command = ["g++", *flags, str(HERE / f"{name}.cpp"), *map(str, objects), "-o", str(program)]
        subprocess.run(command, check=True)
        return program

    return build_test


def run(program: Path, *arguments: object, limit_s: float = LIMIT_S) -> str:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=limit_s)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{program.name} {arguments}: exit {done.returncode}\n{said}"
    return done.stdout


def test_random_collectives_give_what_the_ranks_put_in(build):
    program = build("test_collectives")
    for world, rounds in ((1, 50), (2, 600), (3, 300), (4, 150), (7, 30)):
        assert f"{world} ranks" in run(program, world, rounds, 20260 + world)


def test_random_messages_and_background_calls_arrive_whole(build):
    program = build("test_messages")
    for world, rounds in ((2, 200), (3, 100), (4, 50)):
        assert f"{world} ranks" in run(program, world, rounds, 4711 + world)


def test_faults_are_errors_on_every_rank(build):
    num_kills = 200
    assert "ok" in run(build("test_faults"), num_kills)


def test_linear_layers_are_exact_on_a_team_of_threads(build):
    assert "ok" in run(build("test_skinny"))


def test_linear_layers_in_f32_are_exact_for_every_width_of_panels(build):
    assert "ok" in run(build("test_skinny_f32"))


def test_linear_layers_on_16_bits_are_exact_for_every_number_of_rows(build):
    assert "ok" in run(build("test_half"))


def test_layers_and_lookups_on_quantized_weights_are_exact(build):
    assert "ok" in run(build("test_quantized"))


def soak(build, world: int, calls: int, soak_s: int, seed: int) -> tuple[int, int]:
    """Calls that each rank made until it had made so many or the time was up, and those of the rarest kind."""
    said = run(build("soak"), world, calls, soak_s, seed, limit_s=soak_s + LIMIT_S)
    found = re.fullmatch(rf"(\d+) calls on {world} ranks, at least (\d+) of a kind\n", said)
    assert found, said
    return int(found[1]), int(found[2])


@pytest.mark.slow
@pytest.mark.parametrize("build", ["plain"], indirect=True)
def test_soak_of_half_a_minute(build):
    for world, soak_s in ((2, 14), (3, 8), (4, 8)):
        calls, of_a_kind = soak(build, world, 10**9, soak_s, world)
        assert of_a_kind >= 1, f"{world} ranks made {calls} calls, and one kind not at all"


@pytest.mark.nightly
@pytest.mark.parametrize("build", ["plain"], indirect=True)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_soak_of_ten_million_calls(build, world):
    # Ranks that are not in a group leave its calls out.
    calls = 10**7 if world == 2 else 2 * 10**7
    assert soak(build, world, calls, 4 * 3600, world)[0] >= 10**7


def test_attention_agrees_with_plain_loops(build):
    assert "worst error" in run(build("test_attention"), 40)


def test_attention_in_f32_agrees_with_plain_loops(build):
    assert "worst error" in run(build("test_attention_f32"))
