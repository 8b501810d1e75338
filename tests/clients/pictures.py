"""The pictures of the pages on frameworks, from runs that `make clients` left.

    python -m tests.clients.pictures [NAME...]     # NAME as in PICTURES; default: all

They are made and not pasted: after a change of a page, run the clients and this, and look at what git shows.
"""

import sys
import tempfile
from pathlib import Path

from dtprof.cli import main as cli
from tests.browser.conftest import Page, open_browser
from tests.clients.__main__ import PLACE
from tests.docs.report_images import take

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "frameworks"
PICTURES = {
    "accelerate": ("accelerate-marked", "overview"),
    "deepspeed-pipeline": ("deepspeed-pipeline", "pipeline"),
    "fairscale": ("fairscale-oss", "memory"),
    "hivemind": ("hivemind-peers", "overview"),
    "lightning": ("lightning-marked", "overview"),
    "megatron": ("megatron-interleaved", "pipeline"),
    "ray": ("ray-train", "overview"),
    "torchft": ("torchft-replicas", "overview"),
    "torchtitan": ("torchtitan-fsdp", "overview"),
    "transformers": ("transformers-marked", "overview"),
}
"""By name of the picture: the client, and the page of its report."""


def main(names: list[str]) -> None:
    """Take these pictures; all without a name."""
    with tempfile.TemporaryDirectory(prefix="dtprof-pictures-") as folder, open_browser(Path(folder) / "p") as driver:
        for name in names or PICTURES:
            client, page = PICTURES[name]
            html = Path(folder) / f"{name}.html"
            if status := cli.main(["report", str(PLACE / "runs" / client), "-o", str(html)]):
                raise SystemExit(status)
            take(Page(driver, html), page, FOLDER / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
