"""Train a few steps on layouts of the reference trainer: layouts.py FOLDER MODEL STEPS [covering].

Writes the metrics of each layout to a file of its own in FOLDER.
"""

import shlex
import sys
from pathlib import Path

from reference_trainer.parity import BASE, Ranks
from reference_trainer.parity_layouts import LAYOUTS


def main(folder, model, steps, which="all"):
    ranks = Ranks()
    try:
        for number, layout in enumerate(LAYOUTS):
            if which == "covering" and not layout.covering:
                continue
            text = f"{BASE} --model {model} --steps {steps} {layout.both} {layout.arguments}"
            error = ranks.train(shlex.split(text), layout.num_ranks, Path(folder) / f"{number:03d}.jsonl")
            print(f"{layout.num_ranks} ranks {layout.arguments}: {error or 'done'}", flush=True)
            if error:
                sys.exit(1)
    finally:
        ranks.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
