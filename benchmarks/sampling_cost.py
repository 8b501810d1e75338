"""What the sampling of a rank's lines costs while it lasts: processor time of a step, and of the sampler.

A process trains a small model; some steps run while `take_profiles` samples it, at the highest rate of a job, the
others do not. A job is sampled like this for 2 s at most four times and for 5 s or more, at a lower rate, twice.
"""

import resource
import subprocess
import sys
from threading import Event, Thread

from benchmarks import pairs
from dtprof.launch.line_sampler import LATE_RATE, LATE_SAMPLE_S
from dtprof.launch.stack_profiles import take_profiles

PROGRAM = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(32, 64)
def step():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
for _ in range(200):
    step()
for line in sys.stdin:
    started = time.process_time_ns()
    for _ in range(int(line)):
        step()
    print((time.process_time_ns() - started) / int(line) / 1e3, flush=True)
"""
PAIRS, STEPS = 40, 200


def main() -> None:
    """Measure steps that are sampled and steps that are not, in turn."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        used: list[float] = []

        def step_us() -> float:
            stdin.write(f"{STEPS}\n")
            stdin.flush()
            return float(stdout.readline())

        def sampled_step_us() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            samples: list[int] = []

            def sample() -> None:
                taken = take_profiles([process.pid], Event(), duration_s=LATE_SAMPLE_S, rate=LATE_RATE)
                samples.extend(profile.samples for profile, _ in taken)

            sampling = Thread(target=sample)
            sampling.start()
            times = []
            while sampling.is_alive():
                times.append(step_us())
            sampling.join()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert samples, "py-spy cannot sample a process here"
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            return sum(times) / len(times)

        compared = pairs.in_turn(step_us, sampled_step_us, pairs=PAIRS, unit="us CPU a step")
        stdin.close()
    pairs.report("sampling", compared, a="not sampled", b="sampled")
    pairs.show("sampling", f"py-spy for {LATE_SAMPLE_S:g} s, s CPU", used)


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
