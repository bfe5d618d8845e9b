"""vLLM's serving benchmark, as `vllm bench serve` runs it, with a result that is there or right.

Goes past the command `vllm`, which not every distribution of vLLM installs in working order. The
result file appears only when every request was served.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def check(path: Path) -> None:
    """ValueError if a request of a finished benchmark was not served."""
    result = json.loads(path.read_text())
    completed, wanted = int(result["completed"]), int(result["num_prompts"])
    if completed != wanted:
        raise ValueError(f"{wanted - completed} of {wanted} requests failed")


def run(arguments: list[str], result: Path) -> None:
    """Run the benchmark into a result file beside the final one, check it, and rename it."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="serving_benchmark")
    add_cli_args(parser)
    result.parent.mkdir(parents=True, exist_ok=True)
    part = result.with_suffix(".part")
    part.unlink(missing_ok=True)
    fixed = ["--save-result", "--result-dir", str(part.parent), "--result-filename", part.name]
    serve(parser.parse_args([*arguments, *fixed]))
    check(part)
    part.rename(result)


def main(
    arguments: Annotated[list[str], typer.Argument(help="the benchmark's own, after --")],
    result: Annotated[Path, typer.Option(help="where its JSON goes")],
) -> None:
    """Run vLLM's serving benchmark once."""
    try:
        run(arguments, result)
    except ValueError as error:
        print(f"{result.stem}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
