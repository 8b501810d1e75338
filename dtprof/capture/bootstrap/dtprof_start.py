"""Start of dtprof in a Python process of a job: waits until the job has imported torch, then arms the process.

Reached by one of three ways: the `sitecustomize` beside it, which `dtprof run` puts first on PYTHONPATH; the `.pth`
file that `dtprof inject install` writes; `import dtprof.auto`. The second one may be asked to record every torch job
of the machine: then launchers become the command of a `dtprof run`, and ranks that have none record by themselves.
Runs in interpreters that have no dtprof: standard library only, and little of it, since while jobs run it is loaded by
every process of an interpreter with that file (importlib.abc and importlib.util alone take 20 ms).
"""

import importlib
import os
import sys
import time

STARTED_NS = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUN_DIR, STEP_CLOCK = "DTPROF_RUN_DIR", "DTPROF_STEP_CLOCK"
PROBE_DIR = "DTPROF_PROBE_DIR"
JOBS_FOLDER = "/tmp/dtprof-jobs-%d"
ALWAYS, OFF = "DTPROF_ALWAYS", "DTPROF_OFF"
MOST_ANCESTORS = 64

waiting = False  # or done: what follows torch is hooked


def import_dtprof():
    """Import the dtprof that started this job, also where it is not installed for this interpreter."""
    import importlib.util

    if "dtprof" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "dtprof", os.path.join(PACKAGE, "__init__.py"), submodule_search_locations=[PACKAGE]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["dtprof"] = module
        spec.loader.exec_module(module)
        return
    with open(os.path.join(PACKAGE, "__init__.py"), encoding="utf-8") as file:
        ours = [line.split('"')[1] for line in file if line.startswith('__version__ = "')]
    theirs = getattr(sys.modules["dtprof"], "__version__", "of an unknown version")
    if theirs not in ours:
        place = getattr(sys.modules["dtprof"], "__file__", "an unknown file")
        say(
            f"process {os.getpid()} has imported dtprof {theirs} ({place}), dtprof {ours[0]} started the job: "
            "install one version"
        )


def arm():
    """Arm this process; whatever goes wrong is one line on stderr."""
    if os.environ.get(PROBE_DIR):
        probe()
        return
    try:
        import_dtprof()
        if os.environ.get(RUN_DIR):
            from dtprof.capture import arm as armed

            armed.arm()
        if os.environ.get(STEP_CLOCK):
            from pathlib import Path

            from dtprof.capture import step_clock

            step_clock.StepClock(Path(os.environ[STEP_CLOCK]), STARTED_NS).install()
    except Exception as error:
        tell(error)


def probe():
    """Probe in place of this process's program, unless that starts ranks; the program must not run in any case."""
    try:
        import_dtprof()
        # By name: capture knows nothing of launch, and this file starts what its environment asks for.
        probe_run = importlib.import_module("dtprof.launch.rank_probe.probe_run")
    except Exception as error:
        tell(error)
        os._exit(1)
    probe_run.take_over()


def is_wanted():
    """Say whether the environment asks for anything to be done in this process."""
    return any(os.environ.get(name) for name in (RUN_DIR, STEP_CLOCK, PROBE_DIR))


def tell(error):
    """Say that this process is not recorded."""
    say(f"disabled in process {os.getpid()}: {type(error).__name__}: {error}")


def say(text):
    """Say it in a line on stderr; a program may have closed that, or put anything in its place."""
    try:
        os.write(sys.stderr.fileno(), f"dtprof: {text}\n".encode("utf-8", "backslashreplace"))
    except Exception:
        return


class AfterTorch:
    """Finder and loader: arms the process right after torch has been imported, once."""

    def __init__(self, then=None):
        """Wait for the import; `then` is called after it, `arm` where it is not given."""
        self.then = then
        self.original = None
        self.searching = False

    def find_spec(self, name, path=None, target=None):
        """Find torch as Python would without this finder, and replace its loader.

        A program may look for torch long before it imports it, so this stays until torch is executed.
        """
        if name != "torch" or self.searching:
            return None
        import importlib.util

        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            self.original = spec.loader
            spec.loader = self
        return spec

    def __getattr__(self, name):
        """Expose torch's own loader to code that only inspects it."""
        if name in ("original", "then"):
            raise AttributeError(name)
        return getattr(self.original, name)

    def create_module(self, spec):
        """Let torch's own loader create the module."""
        return self.original.create_module(spec)

    def exec_module(self, module):
        """Let torch's own loader execute the module, give it back, and arm."""
        module.__spec__.loader = module.__loader__ = self.original
        self.original.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        (self.then or arm)()


def wait_for_torch():
    """Arm this process, once, when it has imported torch, where its environment asks for it."""
    global waiting
    if not waiting and is_wanted():
        waiting = True
        if "torch" in sys.modules:
            arm()
        else:
            sys.meta_path.insert(0, AfterTorch())


def wait_for_torch_of_ancestors_job():
    """Wait for torch where the environment was cleared or is ignored: a parent's announcement names the job."""
    try:
        if not is_wanted():
            os.environ.update(find_job())
    except Exception:
        return  # no job of ours, or an unknown one: leave the process alone
    wait_for_torch()


def record_always(store, python, is_launcher):
    """Record this process's job into a store, unless that, its owner's switch or the environment turns it off.

    A launcher becomes the command of a `dtprof run`, in the same process. Where that cannot be, it runs as it is.
    """
    if waiting or os.environ.get(OFF, "0") not in ("", "0"):
        return
    problem = find_problem(store)
    if problem:
        reason = f"this job is not recorded: {problem}"
        if is_launcher:
            say(reason)
        elif os.environ.get("RANK", "0") == "0":
            sys.meta_path.insert(0, AfterTorch(lambda: say(reason)))
        return
    if is_off(store):
        return
    os.environ[ALWAYS] = store
    if is_launcher:
        sys.stdout.flush()
        os.execv(python, [python, "-m", "dtprof", "run", "--", sys.executable, *sys.orig_argv[1:]])
    sys.meta_path.insert(0, AfterTorch(record_rank))


def find_problem(store):
    """Say why there can be no store of this name; nothing where there is one."""
    if not os.path.isabs(store):
        return f"{ALWAYS} is {store!r}, a relative path; give it as an absolute one: jobs start in different folders"
    if not os.path.isdir(store):
        return f"there is no folder {store}; make it with dtprof inject install --site --store {store}"
    return ""


def record_rank():
    """Record a rank that no launcher of ours has started."""
    try:
        import_dtprof()
        importlib.import_module("dtprof.auto")
    except Exception as error:
        tell(error)


def is_off(store):
    """Say whether a file `off` in the store turns recording off."""
    try:
        return os.lstat(os.path.join(store, "off")).st_uid in (0, os.getuid(), os.lstat(store).st_uid)
    except OSError:
        return False


def find_job():
    """Return the environment that the nearest ancestor running a job has left for it; empty where there is none."""
    folder = JOBS_FOLDER % os.getuid()
    if not os.path.exists(folder):
        return {}
    status = os.lstat(folder)
    # Names what is loaded into this process: nobody else may have written it.
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or os.path.islink(folder):
        return {}
    pid = os.getppid()
    for _ in range(MOST_ANCESTORS):
        if pid <= 1:
            break
        parent, started = parent_and_start(pid)
        file = os.path.join(folder, "%d-%d.json" % (pid, started))
        if os.path.exists(file):
            import json

            with open(file, encoding="utf-8") as stream:
                return {str(name): str(value) for name, value in json.load(stream).items()}
        pid = parent
    return {}


def parent_and_start(pid):
    """Return the parent of a process, and when it started, in ticks since boot: with the pid that is unique."""
    with open("/proc/%d/stat" % pid, "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[19])
