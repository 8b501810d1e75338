"""How many operations gloo itself counted: the oracle that a run is compared with.

gloo numbers the operations of a group, collectives and point-to-point alike, below everything that dtprof hooks.
"""

import gc
import json
import time
import traceback
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from tests.completeness.programs.names import WHOLE

ERRORS = (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def now_ns():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Oracle:
    """The counts of one rank, measurement by measurement."""

    def __init__(self, folder):
        self.folder = folder
        self._entries = []
        self._known = Counter()  # by group name: operations where gloo has no counter, as the program knows them
        self._retired = Counter()  # by group name: counts of groups that are destroyed
        self._listed_nowhere = []
        self._begin_ns = now_ns()

    def watch(self, *groups):
        """Count in groups that torch itself does not list."""
        self._listed_nowhere.extend(groups)

    def expect(self, group, count):
        """Take the program's word for operations in a group for which gloo has no counter."""
        self._known[group.group_name] += count

    def counters(self):
        """Return the operations so far by name of the group."""
        counts = self._retired + self._known
        for group in [*dist.distributed_c10d._world.pg_map, *self._listed_nowhere]:
            try:
                counts[group.group_name] += group._get_sequence_number_for_group()
            except RuntimeError:
                continue  # several back ends, or one without a counter: see expect
        return counts

    def measure(self, section, name, function, refused=None, tensors=1):
        """Run a call or a scenario, and write down how far the counters moved meanwhile.

        Parameters:
            section: what it is listed under.
            name: what it is.
            function: makes it.
            refused: part of what torch itself says where it refuses, with and without dtprof.
            tensors: how many tensors a coalesced reduce_scatter has in it.
        """
        before, begin_ns, error = self.counters(), now_ns(), ""
        try:
            function()
        except ERRORS as raised:
            error = f"{type(raised).__name__}: {raised}"[:400]
            if refused is None:
                traceback.print_exc()
        end_ns, after = now_ns(), self.counters()
        after.subtract(before)
        self._add(section, name, begin_ns, end_ns, after, error=error, refused=refused, tensors=tensors)

    def retire(self, group):
        """Destroy one group; its count is kept."""
        self._retired[group.group_name] += group._get_sequence_number_for_group()
        dist.destroy_process_group(group)

    def destroy(self):
        """End all groups; their counts are kept."""
        gc.collect()  # torch's wrappers must let go of a group before it is destroyed
        self._retired = self.counters() - self._known
        self._listed_nowhere.clear()
        dist.destroy_process_group()

    def write(self, rank):
        """Write all of it, and the whole process as a measurement of its own."""
        self._add("", WHOLE, self._begin_ns, now_ns(), self.counters())
        Path(self.folder, f"oracle-{rank}.json").write_text(json.dumps(self._entries))

    def _add(self, section, name, from_ns, to_ns, counts, **fields):
        gloo = {group: count for group, count in counts.items() if count}
        entry = {"section": section, "name": name, "from_ns": from_ns, "to_ns": to_ns, "gloo": gloo}
        self._entries.append(entry | fields)
