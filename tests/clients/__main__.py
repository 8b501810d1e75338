"""Run clients of real frameworks under dtprof, each in an environment of its own: `python -m tests.clients [NAME ...]`.

The environments lie in .make/clients, over the packages of this one: the frameworks come from PyPI without their
dependencies, torch above all. Each client is checked for what an independent count gives: it feeds so many tokens and
samples, so many ranks share its state, and its schedule is known.
"""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run

REPOSITORY = Path(__file__).resolve().parents[2]
PLACE = REPOSITORY / ".make" / "clients"
PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = {
    "accelerate": "accelerate transformers tokenizers huggingface_hub safetensors pyyaml regex tqdm requests filelock "
    "packaging fsspec hf-xet typer httpx certifi idna httpcore h11 anyio sniffio urllib3 charset-normalizer click "
    "shellingham",
    "lightning": "lightning pytorch-lightning lightning-utilities torchmetrics pyyaml tqdm aiohttp packaging",
    "deepspeed": "deepspeed einops hjson msgpack ninja py-cpuinfo pydantic pydantic-core annotated-types "
    "typing-inspection tqdm packaging psutil",
    "megatron": "megatron-core packaging einops",
    "fairscale": "fairscale",
    "torchft": "torchft opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http opentelemetry- "
    "exporter-otlp-common opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-http-transport "
    "opentelemetry-proto opentelemetry-semantic-conventions googleapis-common-protos requests certifi idna "
    "urllib3 charset-normalizer",
}
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program of a framework, and what is known of it: 2 ranks, 12 steps."""

    framework: str
    program: str
    arguments: tuple[str, ...] = ()
    starts_ranks: bool = False
    steps: int = 12
    tokens: int | None = 128  # 2 ranks, 4 sequences of 16 each
    samples: int = 8
    phases: tuple[str, ...] = ()  # that the program names
    scheme: str = "none"
    shards: int = 2
    schedule: str | None = None
    theory: float = 0.0
    axes: frozenset[str] = field(default=frozenset({"dp"}))  # of groups that communicated


CLIENTS = {
    "lightning-ddp": Client(framework="lightning", program="lightning_ddp.py", starts_ranks=True),
    # 12 marks, and the evaluation of Lightning after the last: a step that nothing ends.
    "lightning-marked": Client(
        framework="lightning", program="lightning_ddp.py", arguments=("marked",), starts_ranks=True,
        phases=("validation",),
    ),
    "accelerate-ddp": Client(framework="accelerate", program="accelerate_ddp.py", tokens=256, samples=16),
    "transformers-trainer": Client(
        framework="accelerate", program="transformers_trainer.py", arguments=(str(PLACE / "trainer"),)
    ),
    "transformers-marked": Client(
        framework="accelerate", program="transformers_trainer.py", arguments=(str(PLACE / "trainer"), "marked")
    ),
    "deepspeed-zero1": Client(framework="deepspeed", program="deepspeed_zero.py", arguments=("1",), scheme="zero1"),
    "deepspeed-zero2": Client(framework="deepspeed", program="deepspeed_zero.py", arguments=("2",), scheme="zero2"),
    "deepspeed-zero3": Client(framework="deepspeed", program="deepspeed_zero.py", arguments=("3",), scheme="zero3"),
    "deepspeed-pipeline": Client(
        framework="deepspeed", program="deepspeed_pipeline.py", tokens=None, samples=16, shards=1, schedule="1F1B",
        theory=1 / 5, axes=frozenset({"dp", "pp"}),
    ),
    "megatron-1f1b": Client(
        framework="megatron", program="megatron_pipeline.py", arguments=("1", "2"), tokens=256, shards=1,
        schedule="1F1B", theory=1 / 5, axes=frozenset({"pp", "tp"}),
    ),
    "megatron-interleaved": Client(
        framework="megatron", program="megatron_pipeline.py", arguments=("1", "2", "2"), tokens=256, shards=1,
        schedule="Interleaved1F1B", theory=1 / 9, axes=frozenset({"pp", "tp"}),
    ),
    "fairscale-oss": Client(framework="fairscale", program="fairscale_oss.py", scheme="zero2"),
    # The second replica fails after 6 steps: both have the 6 after it.
    "torchft-replicas": Client(
        framework="torchft", program="torchft_replicas.py", starts_ranks=True, steps=6, axes=frozenset({"dp_replicate"})
    ),
}  # fmt: skip


def build(framework: str) -> Path:
    """Build the environment of a framework, unless it is there; return its Python."""
    folder = PLACE / framework
    python = folder / "bin" / "python"
    done = folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = [path for path in sys.path if path.endswith("site-packages")]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        lines = "".join(f"{path}\n" for path in (str(REPOSITORY), *packages))
        (folder / "lib" / version / "site-packages" / "b_dtprof.pth").write_text(lines)
        command = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES[framework].split()]
        subprocess.run(command, check=True)
        done.touch()
    return python


def run(name: str, client: Client) -> list[str]:
    """Run a client; return what is wrong with what dtprof says of it."""
    python, output = build(client.framework), PLACE / "runs" / name
    launcher = [] if client.starts_ranks else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(python), *launcher, str(PROGRAMS / client.program), *client.arguments]
    command = [str(python), "-m", "dtprof", "run", "--force", "--output", str(output), "--", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=PLACE
    )
    if done.returncode:
        return [f"exit status {done.returncode}: {done.stderr[-2000:]}"]
    summary = summarise(open_run(output))
    blamed = [line for line in done.stderr.splitlines() if "/dtprof/" in line]
    return [f"dtprof's files are blamed: {line}" for line in blamed] + compare(client, summary)


def compare(client: Client, summary: Summary) -> list[str]:
    """Return where a summary differs from what is known of a client."""
    throughput, pipeline = summary.throughput, summary.pipeline
    formula = summary.ranks[0].memory_formula
    communicated = {row.group for row in summary.collectives}
    found = {
        "steps": (summary.steps.count, client.steps),
        "tokens a step": (throughput and throughput.tokens_per_step, client.tokens),
        "samples a step": (throughput and throughput.samples_per_step, client.samples),
        "named phases": (tuple(sorted(summary.ranks[0].user_phases_ns or {})), client.phases),
        "scheme": (formula and formula.scheme, client.scheme),
        "shards": (formula and formula.shards, client.shards),
        "schedule": (pipeline and pipeline.schedule, client.schedule),
    }
    wrong = [f"{what}: {have}, expected {known}" for what, (have, known) in found.items() if have != known]
    axes = {group.axis for group in summary.groups if group.name in communicated and group.axis}
    if axes != client.axes:
        wrong.append(f"axes: {sorted(axes)}, expected {sorted(client.axes)}")
    if pipeline is not None:
        share = (pipeline.parts or {}).get("schedule")
        if share is None or abs(share - client.theory) > 0.05:
            wrong.append(f"part of the schedule in the bubble: {share}, by theory {client.theory:.3f}")
    return wrong


def main(names: list[str]) -> int:
    """Run the clients of these names, all without one; return the exit status."""
    PLACE.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or CLIENTS:
        wrong = run(name, CLIENTS[name])
        failed += bool(wrong)
        print(f"{name}: {'; '.join(wrong) or 'right'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
