"""Predict the gain of changes of a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtprof.session.engines import Engine, at_hand, executor_for

if TYPE_CHECKING:
    from dtprof.analysis.whatif.prediction import Prediction
    from dtprof.analysis.whatif.whatif_changes import Fix
    from dtprof.records.reader import Run


def predict(run: "Run", engine: Engine, fixes: "Sequence[Fix]" = ()) -> "Prediction":
    """Replay a run as it was and changed; without changes each single one that there is something for.

    Raises:
        UsageError: a change names what the run does not have, or changes contradict each other.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    from dtprof.analysis.whatif.prediction import Prediction, predict, refuse_impossible
    from dtprof.analysis.whatif.run_graph import read_graph

    refuse_impossible(fixes)
    with executor_for(engine, run) as executor:
        source = read_graph(at_hand(run, executor), executor)
    if isinstance(source, str):
        return Prediction(run=run.name, cannot_tell=(source,))
    return predict(run.name, source, fixes)
