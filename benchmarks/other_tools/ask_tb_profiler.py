"""Print what the pages of torch-tb-profiler show: ask_tb_profiler.py TRACES. Runs in an environment that has it."""

import json
import re
import sys


def text_of(html: str) -> str:
    """Return a text without its tags."""
    return re.sub(r"<[^>]+>", "", html)


def main() -> None:
    """Print the overview of each worker, its advice, and the view of all workers."""
    from torch_tb_profiler import io  # type: ignore[import-untyped]
    from torch_tb_profiler.profiler.loader import RunLoader  # type: ignore[import-untyped]

    run = RunLoader("job", sys.argv[1], io.Cache()).load()
    for (worker, _), profile in sorted(run.profiles.items(), key=lambda item: str(item[0])):
        print(f">>> {worker}")
        overview = getattr(profile, "overview", None)
        if overview is not None:
            for row in overview["performance"]:
                print(row["name"], row.get("value"))
                for child in row.get("children", ()):
                    print("  ", child["name"], child.get("value"))
            print("advice:", text_of(str(overview.get("recommendations"))))
        for name in ("steps_to_overlap", "steps_to_wait", "comm_ops"):
            if getattr(profile, name, None):
                print(f"{name}:", json.dumps(getattr(profile, name))[:700])


if __name__ == "__main__":
    main()
