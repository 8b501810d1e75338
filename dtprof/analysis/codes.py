"""The codes of records that analysis needs, equal to those of the format of runs (a test compares them).

Analysis imports nothing of the format, so that tables from anywhere can be analysed.
"""

COLLECTIVE, POINT_TO_POINT = 1, 2
ISSUED, RETURNED, DONE, FAILED = 1, 2, 3, 4
COMPLETION_SEEN = 2
INFERRED_SITE = 16
