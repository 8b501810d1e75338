"""Caveats and ends of ranks are their text to Python, JSON and workers, and keep their parts."""

import json
import pickle
import signal

from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.analysis.results import Caveat


def test_a_caveat_is_its_sentence_and_keeps_its_parts_between_processes() -> None:
    caveat = Caveat("tokens_per_s", "no data loader was seen", is_usual=True)
    assert caveat == "tokens_per_s: no data loader was seen"
    assert json.dumps([caveat]) == '["tokens_per_s: no data loader was seen"]'
    again = pickle.loads(pickle.dumps(caveat))
    assert (again.subject, again.reason, again.is_usual) == ("tokens_per_s", "no data loader was seen", True)
    assert Caveat("", "the run was cut off") == "the run was cut off"


def test_the_end_of_a_rank_is_its_words_and_keeps_its_parts_between_processes() -> None:
    end = pickle.loads(pickle.dumps(RankEnd(EndState.KILLED, signal.SIGKILL)))
    assert end == "killed by SIGKILL"
    assert (end.state, end.code, end.failed) == (EndState.KILLED, signal.SIGKILL, True)
    assert RankEnd(EndState.EXITED, 3) == "exited 3"
