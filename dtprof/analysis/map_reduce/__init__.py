"""Two passes over the ranks of a run, each a map over parts of the ranks whose small results are joined.

The survey, the first pass, finds facts, steps and collective instances of every rank (`survey.py`, `rank_facts.py`).
The reduction, the second pass, is given the measured steps and the instances of all ranks, and sums up (`reduction.py`,
`rank_sums.py`). No rank is kept in memory. Both passes read long logs by ranges of steps (`long_log_survey.py`,
`long_log_reduction.py`), whose results are joined (`step_range_joins.py`).
"""
