"""Run the framework scenarios of some families, one after the other, measured by the oracle.

python -m tests.completeness.programs.scenarios FOLDER FAMILY...    -> FOLDER/oracle-RANK.json
"""

import datetime
import importlib
import sys

import torch
import torch.distributed as dist

from tests.completeness.programs import surroundings
from tests.completeness.programs.oracle import Oracle


def main(folder, families):
    oracle = surroundings.ORACLE = Oracle(folder)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    for family in families:
        scenarios = importlib.import_module(f"tests.completeness.programs.{family}").SCENARIOS
        for name, ranks, refused, function in scenarios.all:
            if size in ranks:
                torch.manual_seed(0)
                oracle.measure(scenarios.section, name, function, refused)
    dist.barrier()
    oracle.destroy()
    oracle.write(rank)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
