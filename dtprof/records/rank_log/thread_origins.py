"""Find the line of the user's code for events of threads that run none of it, as those of an executor.

A rank records a line of the library that such a thread runs; here the line that started the thread takes its place.
"""

import dataclasses

import numpy as np

from dtprof.columns import distinct
from dtprof.records.rank_log.ddp_buckets import free_site
from dtprof.records.rank_log.strings import Strings
from dtprof.records.sites import Site
from dtprof.records.tables import Array
from dtprof.records.user_files import is_user_file


def place_threads(strings: Strings, *tables: Array) -> None:
    """Assign to events the site of the line that started their thread; new sites are added to those of `strings`."""
    sites, new_sites = strings.sites, dict[tuple[Site, int], int]()
    for thread, native_id in strings.native_threads.items():
        origin = strings.thread_starts.get(native_id)
        for table in tables if origin is not None else ():
            assert origin is not None
            rows = np.flatnonzero(table["thread"] == thread)
            numbers = table["site"][rows]
            for number in distinct(numbers).tolist():
                plain = sites.get(number)
                if plain is None or is_user_file(plain.file):
                    continue
                new = new_sites.setdefault((origin, number), free_site(sites, new_sites))
                sites[new] = dataclasses.replace(plain, file=origin.file, line=origin.line, function=origin.function)
                table["site"][rows[numbers == number]] = new
