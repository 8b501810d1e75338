"""Analysis repeats a few codes of the format; they must stay equal."""

from dtprof.analysis import codes
from dtprof.run_format import schema


def test_codes_are_those_of_the_format() -> None:
    assert (schema.KIND["collective"], schema.KIND["p2p"]) == (codes.COLLECTIVE, codes.POINT_TO_POINT)
    states = [schema.STATE[name] for name in ("issued", "returned", "done", "failed")]
    assert states == [codes.ISSUED, codes.RETURNED, codes.DONE, codes.FAILED]
    assert schema.FLAG["completion"] == codes.COMPLETION_SEEN
    assert schema.FLAG["inferred_site"] == codes.INFERRED_SITE
    assert (schema.FLAG["asked"], schema.FLAG["device"]) == (codes.ASKED, codes.DEVICE)
