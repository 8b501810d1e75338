"""Label operations of two threads: labelled.py FOLDER."""

import sys
import threading

import torch
import torch.distributed as dist
from recording import open_recorder

from dtprof.capture.attribution_labels import AttributionLabels
from dtprof.records.sites import Label


def main(folder):
    recorder = open_recorder(folder)
    recorder.install(["allreduce_", "barrier"])
    labels = AttributionLabels(recorder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outer = labels.id(Label("fsdp", "fsdp all-gather of layers.0", module="layers.0"))
    inner = labels.id(Label("fsdp", "fsdp all-gather of layers.1", module="layers.1"))
    assert labels.id(Label("fsdp", "fsdp all-gather of layers.0", module="layers.0")) == outer

    assert recorder.set_label(outer) == 0
    for label in (outer, inner):
        before = recorder.set_label(label)
        dist.all_reduce(torch.ones(1))
        assert recorder.set_label(before) == label
    other = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    other.start()
    other.join()
    assert recorder.set_label(0) == outer
    dist.all_reduce(torch.ones(1))
    span = recorder.begin_span(recorder.name_id("pp_forward"), False, 3, 5)
    recorder.end_span(span, False, 0, False)
    recorder.close_log()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
