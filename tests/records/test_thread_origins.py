"""Operations of threads that run none of the user's code are those of the line that started the thread."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dtprof.capture.call_sites import code_owners, follow_threads
from dtprof.records.rank_log.strings import Strings
from dtprof.records.rank_log.thread_origins import place_threads
from dtprof.records.tables import OPERATION, SPAN

EXECUTOR = "/usr/lib/python3.11/concurrent/futures/thread.py"


def test_executor_issues_for_the_line_that_first_gave_it_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # undone afterwards
    written: list[str] = []
    follow_threads(code_owners("/torch"), written.append)
    line = sys._getframe().f_lineno + 2
    with ThreadPoolExecutor(1) as executor:
        native_id = executor.submit(threading.get_native_id).result()
        executor.submit(threading.get_native_id).result()
    (started,) = map(json.loads, written)
    assert (started["native_id"], started["line"]) == (native_id, line)

    strings = Strings()
    for number, (file, api) in enumerate([(EXECUTOR, "save"), ("/home/me/train.py", "all_reduce")], start=1):
        strings.take({"k": "site", "id": number, "file": file, "line": 58, "function": "run", "api": api})
    for thread, native in ((1, 1), (2, native_id), (3, 77)):
        strings.take({"k": "thread", "id": thread, "name": "", "native_id": native})
    strings.take(started)
    operations, spans = np.zeros(4, OPERATION), np.zeros(1, SPAN)
    operations["thread"], operations["site"] = [1, 2, 2, 3], [1, 1, 2, 1]
    spans["thread"], spans["site"] = 2, 1
    place_threads(strings, operations, spans)
    assert operations["site"][[0, 2, 3]].tolist() == [1, 2, 1], "other threads, and code of the user's in this one"
    assert operations["site"][1] == spans["site"][0]
    site = strings.sites[int(spans["site"][0])]
    assert (site.file, site.line, site.api) == (__file__, line, "save")
