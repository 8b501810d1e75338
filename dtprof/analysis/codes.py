"""The codes of records that analysis and diagnosis need, equal to those of the format of runs (tests compare them).

Neither imports anything of the format, so that tables from anywhere can be read.
"""

COLLECTIVE, POINT_TO_POINT = 1, 2
ISSUED, RETURNED, DONE, FAILED = 1, 2, 3, 4
ASYNC, COMPLETION_SEEN, DEVICE, INFERRED_SITE, SKIPPED, ASKED = 1, 2, 4, 16, 32, 128
NONE = 255
