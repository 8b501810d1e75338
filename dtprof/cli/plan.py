"""`dtprof plan`: layouts of a model on a cluster, with predicted step time and memory."""

import argparse
import json
from pathlib import Path

from dtprof.cli import engine_options

EPILOG = """\
examples:
  dtprof plan --params 7e9 --ranks 64 --memory 80GiB --flops 400 --link 200 --network 40 --batch 512
  dtprof plan --config config.json --ranks 64 --memory 80GiB --from dtprof-runs/20261121-101500-train
  dtprof plan --from RUN --ranks 16 --check NEXT_RUN

Layouts dp x fsdp x tp x pp x cp x ep with schedule and microbatches, those that fit by step time. What is not given is
measured in the runs of --from, or unknown. docs/how-to/plan-a-layout.md.
exit status: 0; 2 the model, the cluster or a run cannot be read
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="rank layouts of a model on a cluster",
        description="Rank the layouts of a model on a cluster by memory and step time, and say why others cannot be.",
        epilog=EPILOG,
    )
    model = parser.add_argument_group("the model")
    model.add_argument("--params", metavar="N", help="parameters, for example 7e9: of a decoder of usual proportions")
    model.add_argument("--config", type=Path, metavar="FILE", help="configuration of HF, torchtitan or Megatron")
    model.add_argument("--sequence", metavar="N", help="tokens of a sequence (default: of the configuration, or 4096)")
    model.add_argument("--batch", metavar="N", help="sequences of a step (default: that of the run, or 4 a rank)")
    model.add_argument("--recompute", action="store_true", help="layers are recomputed in the backward pass")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--ranks", metavar="N", help="ranks in all (default: those of the run)")
    cluster.add_argument("--hosts", metavar="N", help="hosts (default: 8 ranks each)")
    cluster.add_argument("--memory", metavar="SIZE", help="memory of a rank, for example 80GiB")
    cluster.add_argument("--flops", metavar="TFLOPS", help="that a rank achieves on the model, in 1e12 a second")
    cluster.add_argument("--link", metavar="GB/S", help="bus bandwidth between ranks of a host")
    cluster.add_argument("--network", metavar="GB/S", help="bus bandwidth of a rank between hosts")
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--from",
        dest="from_runs",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="measure what is not given in this run, or take bandwidths from this file of dtprof doctor; repeatable",
    )
    runs.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="keep the figures of the runs of --from in this file of the cluster, and plan with those of all in it",
    )
    runs.add_argument("--check", type=Path, metavar="RUN", help="say how far the plan of this run's layout is off")
    parser.add_argument("--top", metavar="N", default="20", help="plans to list (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plans."""
    from dtprof.report.documents.plan_json import plan_json
    from dtprof.report.text.plan_text import plan_text
    from dtprof.session.layout_plans import PlanRequest, plan

    names = ("params", "sequence", "batch", "ranks", "hosts", "memory", "flops", "link", "network", "top")
    request = PlanRequest(
        texts={name: getattr(arguments, name) for name in names},
        config=arguments.config,
        runs=tuple(arguments.from_runs),
        check=arguments.check,
        calibration=arguments.calibration,
        recompute=arguments.recompute,
    )
    result = plan(request, engine_options.chosen_engine(arguments))
    print(json.dumps(plan_json(result), indent=1) if arguments.json else plan_text(result))
    return 0
