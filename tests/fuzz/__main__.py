"""Fuzz one reader: `python -m tests.fuzz TARGET [--inputs N] [--seed S] [--keep DIR]`; a traceback is a fault.

Inputs that reach new branches of dtprof become seeds of others (atheris, libFuzzer). An input that breaks the reader,
takes longer than a minute or more than 1 GB ends the command, with the input below .make/fuzz/. Exit status 0: all were
survived.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["dtprof"]):
    from tests.fuzz.mutations import mutated
    from tests.fuzz.targets import TARGETS, Target, scratch_folder
from tests.fuzz.comparisons import pass_arrays_by

SLOWEST_S = 60
"""By the clock on the wall, on a machine that may be busy."""
MEMORY_MB = 1024
BROKEN = Path(__file__).parents[2] / ".make" / "fuzz"
"""Where inputs that break a reader are kept."""


def main() -> None:
    """Try as many inputs as are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, help="keep inputs that reach new branches in this directory, and begin there"
    )
    arguments = parser.parse_args()
    BROKEN.mkdir(parents=True, exist_ok=True)
    _go_on_in_a_child()
    target: Target = TARGETS[arguments.target]
    os.environ.pop("DTPROF_RUN_DIR", None)
    with scratch_folder() as name:
        folder = Path(name)
        corpus = arguments.keep or folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(target.seeds(folder)):
            (corpus / f"seed-{i}").write_bytes(seed[: target.max_bytes])
        words = folder / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        fuzz(target, folder, corpus, words, inputs=arguments.inputs, seed=arguments.seed)


def _go_on_in_a_child() -> None:
    """Return in a new process; this one waits for it, and ends as it does.

    libFuzzer goes by the peak of memory that the kernel counts for a process. That begins with the memory of whoever
    started it, by fork and exec: a process of pytest that once held 1 GB. A child that was only forked begins anew.
    """
    child = os.fork()
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(status if status >= 0 else 128 - status)


def fuzz(target: Target, folder: Path, corpus: Path, words: Path, *, inputs: int, seed: int) -> None:
    """Hand the target to libFuzzer, which ends the process."""
    check = target.check(folder)
    counts = {True: 0, False: 0}

    def one(data: bytes) -> None:
        if not any(counts.values()):
            pass_arrays_by()  # atheris puts its hook in when it begins
        counts[check(data)] += 1
        if sum(counts.values()) == inputs:
            print(f"{inputs} inputs, {counts[False]} of them refused with a sentence", file=sys.stderr)

    def mutate(data: bytes, max_bytes: int, number: int) -> bytes:
        return mutated(data, max_bytes, number, atheris.Mutate)

    options = [
        *(sys.argv[0], str(corpus), f"-runs={inputs}", f"-seed={seed}", f"-max_len={target.max_bytes}"),
        *(f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={BROKEN}/"),
        *(["-dict=" + str(words)] if target.words else []),
        "-print_final_stats=1",
    ]
    atheris.Setup(options, one, custom_mutator=mutate)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


main()
