"""Run the trainer: `torchrun --nproc-per-node 4 -m reference_trainer`, or `python -m reference_trainer`."""

import os
import signal
import sys
import time
from collections.abc import Sequence

from reference_trainer.checkpoint_folder import refuse_folder
from reference_trainer.errors import UsageError
from reference_trainer.options import parse_options
from reference_trainer.outputs import prepare_scalars
from reference_trainer.placement import read_placement
from reference_trainer.windows import read_tokens

LINGER_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Train, and return the exit status: 0 trained, 2 the command line or the corpus has to change."""
    placement = read_placement(os.environ)
    try:
        options = parse_options(arguments, placement)
        if options.preset.needs_cuda or options.share_devices:
            # Before the text of such a preset is read, which takes minutes the first time.
            from reference_trainer.parallelism.devices import choose_device

            choose_device(options, placement)
        tokens = read_tokens(options)
        refuse_folder(options, tokens)
        prepare_scalars(options.tensorboard)
        # Only now: loading torch takes seconds, and most refusals should not.
        from reference_trainer.train import train

        train(options, tokens, placement)
    except UsageError as error:
        # The launcher stops the rest as soon as one rank has ended: so each says it, lives on to its own status, and
        # gives those that started later, or read more slowly, the time to come as far.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        origin = f"[rank {placement.rank}] " if placement.launched else ""
        print(f"{origin}reference_trainer: {error}", file=sys.stderr, flush=True)
        if placement.launched:
            time.sleep(LINGER_S)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
