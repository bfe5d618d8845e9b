"""google-benchmark of the C++ core: planning, messages, coverage.

`python -m bench.core` builds and runs it; arguments go to google-benchmark, for example
`--benchmark_filter=plan_pattern`. Exits with 1 if planning allocates in its steady state.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import record_allocation
from bench.core.native import NOT_INSTALLED, NoGoogleBenchmarkError, build


def write_ids(path: Path) -> None:
    """The recorded block ids, for a reader without JSON: count, producer's ids, consumer's ids."""
    with path.open("w") as file:
        for size, (producer, consumer) in record_allocation.load().items():
            print(size, *producer, *consumer, file=file)


def main(arguments: list[str]) -> int:
    """The exit status of the benchmark; NOT_INSTALLED if it can't be built here."""
    try:
        program = build("kvpush_bench_core")
    except NoGoogleBenchmarkError as error:
        print(error)
        return NOT_INSTALLED
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.txt"
        write_ids(ids)
        environment = {**os.environ, "KVPUSH_BENCH_IDS": str(ids)}
        return subprocess.run([program, *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
