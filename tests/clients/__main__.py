"""Run clients of real frameworks under dtprof, each in an environment of its own: `python -m tests.clients [NAME ...]`.

The environments lie in .make/clients, over the packages of this one, torch above all: pip installs a framework from
PyPI, and what it needs beyond these. Each client is checked for what an independent count gives: gloo numbers its
operations, it feeds so many tokens and samples, so many ranks share its state, and its schedule is known.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.steps.throughput import samples_of
from dtprof.records.events import TOKENS
from dtprof.records.reader import open_run
from tests.completeness.comparison import expected_counts

REPOSITORY = Path(__file__).resolve().parents[2]
PLACE = REPOSITORY / ".make" / "clients"
PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = {
    "accelerate": "accelerate transformers",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "fairscale": "fairscale",
    "torchft": "torchft",
    "litgpt": "litgpt",
    "jax": "jax",
    "hivemind": "hivemind",
    "ray": "ray[train]",
    "trl": "trl",
    "torchtune": "torchtune==0.6.1 torchao==0.14.1",
    # It asks for a build for CUDA of what has the kernels of the CPU in another package.
    "torchrec": "--no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 lightning-utilities "
    "iopath portalocker pyre-extensions typing-inspect pyvers",
    "torchtitan": "torch==2.14.1 torchtitan==0.3.0",
    "fairseq2": "torch==2.9.1 fairseq2==0.8.1",
}
LARGE = ("torchtitan", "fairseq2")
"""Run by name alone: they ask for a torch of their own, whose wheels for CUDA take 5.6 GB and more."""
TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program of a framework, and what is known of it: 12 steps."""

    framework: str | None  # None: torch alone
    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    starts_ranks: bool = False
    profiles: bool = False  # it writes a profile into a folder, its last argument, which is imported
    steps: int | None = 12  # None: as many as its peers happen to make
    tokens: int | None = 128  # 2 ranks, 4 sequences of 16 each
    samples: int | None = 8
    phases: tuple[str, ...] = ()  # that the program names
    scheme: str | None = "none"
    shards: int | None = 2
    schedule: str | None = None
    theory: float = 0.0
    inferred: bool = False  # from messages and passes
    advice: str | None = None  # about the bubble, if that of its schedule is the largest part
    most_activations: int | None = None  # bytes
    counted: str | None = None  # a file into which the program writes how many tokens its framework has counted
    axes: frozenset[str] = field(default=frozenset({"dp"}))  # of groups that communicated


CLIENTS = {
    "torch-1f1b": Client(
        framework=None, program="torch_pipeline.py", arguments=("Schedule1F1B",), tokens=None, samples=12, shards=1,
        schedule="1F1B", theory=1 / 7, axes=frozenset({"pp"}),
        advice="8 microbatches or more, or an interleaved or zero-bubble schedule",
    ),
    "torch-interleaved": Client(
        framework=None, program="torch_pipeline.py", arguments=("ScheduleInterleaved1F1B",), tokens=None, samples=12,
        shards=1, schedule="Interleaved1F1B", theory=1 / 13, axes=frozenset({"pp"}),
        advice="8 microbatches or more, more stages a rank, or a zero-bubble schedule",
    ),
    "hand-gpipe": Client(
        framework=None, program="hand_pipeline.py", arguments=("gpipe",), tokens=96, samples=12, shards=1,
        schedule="GPipe", theory=1 / 7, inferred=True, axes=frozenset(),
    ),
    "hand-1f1b": Client(
        framework=None, program="hand_pipeline.py", arguments=("1f1b",), ranks=4, tokens=96, samples=12, shards=1,
        schedule="1F1B", theory=3 / 9, inferred=True, axes=frozenset(),
    ),
    "hand-looped": Client(
        framework=None, program="hand_chunks.py", arguments=("looped",), tokens=None, samples=None, shards=1,
        axes=frozenset(),
    ),
    "hand-vee": Client(
        framework=None, program="hand_chunks.py", arguments=("vee", "mesh"), tokens=96, samples=12, shards=1,
        axes=frozenset({"pp"}),
    ),
    "hand-gossip": Client(
        framework=None, program="gossip_ring.py", arguments=("batched",), ranks=4, tokens=256, samples=16, shards=1,
        axes=frozenset(),
    ),
    # Of 40 steps those of the actor count: 128 tokens in every other step.
    "torch-turns": Client(framework=None, program="actor_critic.py", steps=40, tokens=64, samples=4),
    # Four groups that nothing names; that of all ranks averages gradients of all that is no expert.
    "torch-experts": Client(
        framework=None, program="expert_parallel.py", ranks=4, tokens=256, samples=None, shards=1, axes=frozenset()
    ),
    "torch-recurrent": Client(
        framework=None, program="sequence_first.py", arguments=("recurrent",), tokens=280, samples=8
    ),
    # 35 by 4 ids: nothing says which is the batch.
    "torch-sequence": Client(framework=None, program="sequence_first.py", tokens=280, samples=None),
    "torch-hybrid": Client(
        framework=None, program="hybrid_sharding.py", ranks=4, tokens=256, samples=16, scheme="zero3",
        axes=frozenset({"dp_shard", "dp_replicate"}),
    ),
    "lightning-ddp": Client(framework="lightning", program="lightning_ddp.py", starts_ranks=True),
    # 12 marks, and the evaluation of Lightning after the last: a step that nothing ends.
    "lightning-marked": Client(
        framework="lightning", program="lightning_ddp.py", arguments=("marked",), starts_ranks=True,
        phases=("validation",),
    ),
    "accelerate-ddp": Client(framework="accelerate", program="accelerate_ddp.py", tokens=256, samples=16),
    "accelerate-marked": Client(
        framework="accelerate", program="accelerate_ddp.py", arguments=("marked", "state"), tokens=256,
        samples=16, phases=("gather_for_metrics", "save_state"),
    ),
    "accelerate-ddp-4": Client(
        framework="accelerate", program="accelerate_ddp.py", ranks=4, steps=6, tokens=512, samples=32, shards=4
    ),
    "transformers-trainer": Client(
        framework="accelerate", program="transformers_trainer.py", arguments=("trainer",)
    ),
    "transformers-padded": Client(
        framework="accelerate", program="transformers_padded.py", arguments=("padded",), tokens=None, samples=32,
        counted="padded/tokens",
    ),
    "transformers-marked": Client(
        framework="accelerate", program="transformers_trainer.py", arguments=("trainer", "marked"),
        phases=("validation",),
    ),
    "deepspeed-zero1": Client(framework="deepspeed", program="deepspeed_zero.py", arguments=("1",), scheme="zero1"),
    "deepspeed-accumulated": Client(
        framework="deepspeed", program="deepspeed_zero.py", arguments=("1", "accumulate"), scheme="zero1", tokens=512,
        samples=32, most_activations=1 << 20,
    ),
    "deepspeed-offload": Client(
        framework="deepspeed", program="deepspeed_zero.py", arguments=("2", "offload"), scheme="zero2",
        most_activations=1 << 20,
    ),
    "deepspeed-zero2": Client(framework="deepspeed", program="deepspeed_zero.py", arguments=("2",), scheme="zero2"),
    "deepspeed-zero3": Client(framework="deepspeed", program="deepspeed_zero.py", arguments=("3",), scheme="zero3"),
    "deepspeed-zero3-4": Client(
        framework="deepspeed", program="deepspeed_zero.py", arguments=("3",), ranks=4, tokens=256, samples=16,
        scheme="zero3", shards=4,
    ),
    "deepspeed-pipeline-4": Client(
        framework="deepspeed", program="deepspeed_pipeline.py", ranks=4, tokens=None, samples=32, shards=2,
        schedule="1F1B", theory=1 / 5, axes=frozenset({"dp", "pp"}),
    ),
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
    "megatron-tensor": Client(
        framework="megatron", program="megatron_pipeline.py", arguments=("2", "2"), ranks=4, tokens=256, shards=1,
        schedule="1F1B", theory=1 / 5, axes=frozenset({"pp", "tp"}),
    ),
    "megatron-vendored": Client(
        framework="megatron", program="vendored.py",
        arguments=("copies/megatron", "megatron.core", "lab_core", "megatron_pipeline.py", "2", "2"), ranks=4,
        tokens=256, shards=1, schedule="1F1B", theory=1 / 5, axes=frozenset({"pp", "tp"}),
    ),
    "fairscale-oss": Client(framework="fairscale", program="fairscale_oss.py", scheme="zero2"),
    "fairscale-vendored": Client(
        framework="fairscale", program="vendored.py",
        arguments=("copies/fairscale", "fairscale", "lab_scale", "fairscale_oss.py"), scheme="zero2",
    ),
    # The second replica fails after 6 steps: both have the 6 after it.
    "torchft-replicas": Client(
        framework="torchft", program="torchft_replicas.py", starts_ranks=True, steps=6, axes=frozenset({"dp_replicate"})
    ),
    # Parameters are averaged every 3 steps.
    "torchft-local-sgd": Client(
        framework="torchft", program="torchft_local_sgd.py", starts_ranks=True, axes=frozenset({"dp_replicate"})
    ),
    # Of two fragments of the model one is averaged every 2 steps, and stepped by an optimizer of its own.
    "torchft-diloco": Client(
        framework="torchft", program="torchft_diloco.py", starts_ranks=True, axes=frozenset({"dp_replicate"})
    ),
    "litgpt-fabric": Client(
        framework="litgpt", program="litgpt_fabric.py", starts_ranks=True, tokens=256, samples=16
    ),
    # TRL counts 1,680 tokens in its 12 steps.
    "trl-grpo": Client(framework="trl", program="trl_grpo.py", arguments=("trl-model",), tokens=140),
    # Sequences in one row without padding: their number varies.
    "trl-packed": Client(
        framework="trl", program="trl_sft.py", arguments=("trl-packed", "bfd"), tokens=None, samples=19,
        counted="trl-packed/tokens",
    ),
    # The critic steps once where the actors step twice, and the reward model never.
    "rlhf-roles": Client(framework=None, program="rlhf_roles.py", ranks=4, steps=8, tokens=None, samples=None),
    "ray-train": Client(
        framework="ray", program="ray_train.py", arguments=("ray-results",), starts_ranks=True
    ),
    "ray-fsdp": Client(
        framework="ray", program="ray_fsdp.py", arguments=("ray-results",), starts_ranks=True, scheme="zero3"
    ),
    "hivemind-peers": Client(
        framework="hivemind", program="hivemind_peers.py", starts_ranks=True, steps=None, shards=1, axes=frozenset(),
    ),
    # Of four tables one is replicated; the others have no formula.
    "torchrec-tables": Client(
        framework="torchrec", program="torchrec_dlrm.py", arguments=("mixed",), tokens=None, samples=16, scheme=None,
        shards=None,
    ),
    # torchtune's mesh has a dimension of tensor parallelism of one rank beside `dp`.
    "torchtune-fsdp": Client(
        framework="torchtune", program="torchtune_recipe.py", arguments=("torchtune", "full_finetune_distributed"),
        scheme="zero3",
    ),
    "torchtune-tensor": Client(
        framework="torchtune", program="torchtune_recipe.py", ranks=4, scheme="zero3", axes=frozenset({"dp", "tp"}),
        arguments=(
            "torchtune-tensor", "full_finetune_distributed", "tensor_parallel_dim=2",
            "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
        ),
    ),
    "torchtitan-fsdp": Client(
        framework="torchtitan", program="torchtitan_trainer.py",
        arguments=("torchtitan-data", "data_parallel_shard_degree=2"), tokens=256, scheme="zero3",
        axes=frozenset({"dp_shard"}),
    ),
    "torchtitan-tensor": Client(
        framework="torchtitan", program="torchtitan_trainer.py",
        arguments=("torchtitan-data", "tensor_parallel_degree=2"), samples=4, shards=1, axes=frozenset({"tp"}),
    ),
    "fairseq2-ddp": Client(framework="fairseq2", program="fairseq2_llama.py", arguments=("ddp",)),
    # Of 68 tokens in one row the last has no successor.
    "fairseq2-packed": Client(
        framework="fairseq2", program="fairseq2_llama.py", arguments=("packed",), tokens=134, samples=6
    ),
    "fairseq2-fsdp": Client(
        framework="fairseq2", program="fairseq2_llama.py", arguments=("fsdp2",), ranks=4, tokens=256, samples=16,
        scheme="zero3", axes=frozenset({"dp_shard", "dp_replicate"}),
    ),
    # 6 steps and the one that is over when the profile begins; XLA says of no group what it is for.
    "jax-spmd": Client(
        framework="jax", program="jax_spmd.py", ranks=4, profiles=True, steps=7, tokens=None, samples=None,
        scheme=None, shards=None, axes=frozenset(),
    ),
}  # fmt: skip


def build(framework: str | None) -> Path:
    """Build the environment of a framework, unless it is there; return its Python."""
    if framework is None:
        return Path(sys.executable)
    folder = PLACE / framework
    python = folder / "bin" / "python"
    done = folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = [path for path in sys.path if path.endswith("site-packages")]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        lines = "".join(f"{path}\n" for path in (str(REPOSITORY), *packages))
        (folder / "lib" / version / "site-packages" / "b_dtprof.pth").write_text(lines)
        wanted = PACKAGES[framework].split()
        if not wanted[0].startswith("torch=="):
            (folder / "torch.txt").write_text(f"torch=={metadata.version('torch')}\n")
            wanted += ["-c", str(folder / "torch.txt")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
        done.touch()
    return python


def run(name: str, client: Client) -> list[str]:
    """Run a client; return what is wrong with what dtprof says of it."""
    path, output, counts = build(client.framework), PLACE / "runs" / name, PLACE / "counts" / name
    shutil.rmtree(counts, ignore_errors=True)
    counts.mkdir(parents=True)
    # Reports show the command, and pictures of them are in the documentation: no folder above the repository is in it.
    python, programs = os.path.relpath(path, PLACE), os.path.relpath(PROGRAMS, PLACE)
    program = [f"{programs}/{client.program}", *client.arguments]
    dtprof = [python, "-m", "dtprof"]
    if client.profiles:
        commands = [
            [python, *program, str(counts)],
            [*dtprof, "import", "--force", "--output", str(output), str(counts)],
        ]
    elif client.starts_ranks:
        commands = [[*dtprof, "run", "--force", "--output", str(output), "--", python, *program]]
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(client.ranks)]
        counted = [f"{programs}/counted.py", os.path.relpath(counts, PLACE), *program]
        commands = [[*dtprof, "run", "--force", "--output", str(output), "--", python, *launcher, *counted]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{path.parent}:{os.environ['PATH']}"}
    blamed = []
    for command in commands:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=PLACE
        )
        if done.returncode:
            return [f"exit status {done.returncode}: {done.stderr[-2000:]}"]
        blamed += [line for line in done.stderr.splitlines() if "/dtprof/" in line]
    wrong = [f"dtprof's files are blamed: {line}" for line in blamed] + compare(client, summarise(open_run(output)))
    if client.counted is not None and (seen := int((PLACE / client.counted).read_text())) != (
        recorded := sum_tokens(output, client.ranks, client.steps or 0)
    ):
        wrong.append(f"tokens of all steps: {recorded}, by the framework {seen}")
    return wrong + ([] if client.starts_ranks or client.profiles else compare_counts(output, counts, client.ranks))


def sum_tokens(run: Path, ranks: int, steps: int) -> int:
    """Return the tokens that all ranks of a run recorded in all of its steps."""
    total = 0
    for tables in map(open_run(run).load, range(ranks)):
        rows = samples_of(tables, TOKENS)
        held = np.zeros(steps, np.int64)
        for step, value in zip(rows["step"].tolist(), rows["value"].tolist(), strict=True):
            held[step:] = value
        total += int(held.sum())
    return total


def compare_counts(run: Path, counts: Path, ranks: int) -> list[str]:
    """Return where the operations of a run are not as many as gloo counted in each group."""
    wrong = []
    opened = open_run(run)
    for rank in range(ranks):
        tables = opened.load(rank)
        recorded = expected_counts(tables, tables.operations, 1, failed=False)
        by_gloo = json.loads((counts / f"gloo-{rank}.json").read_text())
        if recorded != {group: count for group, count in by_gloo.items() if count}:
            wrong.append(f"operations of rank {rank}: {recorded}, by gloo {by_gloo}")
    return wrong


def compare(client: Client, summary: Summary) -> list[str]:
    """Return where a summary differs from what is known of a client."""
    throughput, pipeline = summary.throughput, summary.pipeline
    formula = summary.ranks[0].memory_formula
    communicated = {row.group for row in summary.collectives}
    phases = {name for rank in summary.ranks for name in rank.user_phases_ns or {}}
    found = {
        "steps": (summary.steps.count, client.steps),
        "tokens a step": (throughput and throughput.tokens_per_step, client.tokens),
        "samples a step": (throughput and throughput.samples_per_step, client.samples),
        "named phases": (tuple(sorted(phases)), client.phases),
        "scheme": (formula and formula.scheme, client.scheme),
        "shards": (formula and formula.shards, client.shards),
        "schedule": (pipeline and pipeline.schedule, client.schedule),
        "inferred": (pipeline is not None and pipeline.inferred, client.inferred),
    }
    # A batch of padded texts is as long as its longest: the sum over the steps is compared.
    for what in ("tokens a step",) if client.counted else ():
        del found[what]
    if client.steps is None:
        for what in ("steps", "tokens a step", "samples a step"):
            del found[what]
    wrong = [f"{what}: {have}, expected {known}" for what, (have, known) in found.items() if have != known]
    most = max((rank.memory_categories.get("activations") or 0 for rank in summary.ranks), default=0)
    if client.most_activations is not None and not 0 < most < client.most_activations:
        wrong.append(f"activations: {most} B, expected below {client.most_activations} B")
    axes = {group.axis for group in summary.groups if group.name in communicated and group.axis}
    if axes != client.axes:
        wrong.append(f"axes: {sorted(axes)}, expected {sorted(client.axes)}")
    if pipeline is not None:
        parts = pipeline.parts or {}
        share = parts.get("schedule")
        is_largest = share == max(parts.values(), default=None)
        if client.advice is not None and is_largest and pipeline.advice != client.advice:
            wrong.append(f"advice about the bubble: {pipeline.advice}, expected {client.advice}")
        if not all((rank.partition_ns or {}).get("optimizer") for rank in summary.ranks):
            wrong.append("a rank has no time of its optimizer")
        if share is None or abs(share - client.theory) > 0.05:
            wrong.append(f"part of the schedule in the bubble: {share}, by theory {client.theory:.3f}")
    return wrong


def main(names: list[str]) -> int:
    """Run the clients of these names, all without one; return the exit status."""
    PLACE.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or (name for name, client in CLIENTS.items() if client.framework not in LARGE):
        wrong = run(name, CLIENTS[name])
        failed += bool(wrong)
        print(f"{name}: {'; '.join(wrong) or 'right'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
