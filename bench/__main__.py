"""All benchmarks, one after the other: ``python -m bench`` or ``make bench``.

Each runs as a process of its own; what it prints is kept in build/bench as well.
Those with engines take minutes; name some to run only these: ``python -m bench hooks selftest``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.core.native import NOT_INSTALLED

OUT = Path("build/bench")

BENCHES: dict[str, list[str]] = {
    "selftest": ["-m", "kvpush", "selftest"],
    "completion": ["-m", "bench.completion"],
    "handoff": ["-m", "bench.handoff"],
    "desc_prep": ["-m", "bench.desc_prep"],
    "core": ["-m", "bench.core"],
    "hooks": ["-m", "bench.hooks"],
    "replay": ["-m", "bench.replay"],
}


def main(names: list[str]) -> int:
    """Runs the named benchmarks, all if none is named; the exit status of the last that failed."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHES)}")
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    status = 0
    for name in names or BENCHES:
        print(f"== {name}", flush=True)
        log = OUT / f"{name}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *BENCHES[name]], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
        ended = process.wait()
        if name == "core" and ended == NOT_INSTALLED and not names:
            continue  # it has said what to install; the others need nothing of it
        status = ended or status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
