"""The trace that ByteDance published with StragglerAnalysis has the slowdowns that they published."""

from pathlib import Path

import pytest

from dtprof.analysis.whatif.prediction import Prediction
from dtprof.analysis.whatif.whatif_changes import parse_fix
from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_run import write_imported
from dtprof.records.reader import open_run
from dtprof.session.engines import make_engine
from dtprof.session.whatif_prediction import predict

TRACE = Path(__file__).parent / "published" / "trace-ST.parquet"
BY_STAGE = {3: 1.2322559543157936, 0: 0.9980450635272368, 1: 0.9830562530894704, 2: 0.9824931309511952}
BY_OPERATION = {
    "forward": 1.0874989663025318,
    "backward": 1.074156472437866,
    "all_reduce embedding": 1.0095504024370303,
    "reduce_scatter dp": 1.00266695254219,
    "clip": 1.0023506224771044,
    "optimizer": 1.0014767395023902,
    "all_gather dp": 1.0011307740825817,
    "all_reduce tp": 1.0000026919173086,
    "garbage_collection": 1.0,
    "p2p backward": 0.999992994223364,
    "p2p forward": 0.9998586213458615,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "run"
    run, _ = import_files([TRACE])
    write_imported(run, folder)
    return folder


@pytest.fixture(scope="module")
def prediction(published: Path) -> Prediction:
    return predict(open_run(published), make_engine("local"))


def test_slowdowns_are_those_that_were_published(prediction: Prediction) -> None:
    slow = prediction.slowdowns
    assert slow is not None
    assert slow.slowdown == pytest.approx(1.1787021836556841, rel=0, abs=1e-9)
    assert slow.m_w == pytest.approx(0.031404269124045224, rel=0, abs=1e-6)
    assert slow.m_s == pytest.approx(1.2193563788811714, rel=0, abs=1e-6)
    assert slow.by_stage == pytest.approx(BY_STAGE, rel=0, abs=1e-6)
    assert slow.by_operation == pytest.approx(BY_OPERATION, rel=0, abs=1e-6)


def test_replay_is_off_by_the_time_of_the_host_between_operations(prediction: Prediction) -> None:
    # Published: 2.2144477 s as measured, 2.1726968 s without launch delays.
    assert prediction.replay_error == pytest.approx(1 - 2.172696813310722 / 2.2144477, abs=1e-6)


def test_ranks_of_the_last_stage_are_the_slowest(prediction: Prediction) -> None:
    assert prediction.slowdowns is not None
    assert list(prediction.slowdowns.by_rank)[:2] == [7, 6]


def test_a_stage_like_the_others_gains_more_than_any_of_its_ranks(published: Path) -> None:
    run, engine = open_run(published), make_engine("local")
    stage, rank = (predict(run, engine, [parse_fix(fix)]).scenarios[0] for fix in ("stage=last", "rank=7"))
    assert stage.gain is not None
    assert rank.gain is not None
    assert stage.gain > 0.2 > rank.gain > -0.01
