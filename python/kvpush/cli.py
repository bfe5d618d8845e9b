"""The command `kvpush`. Imports that cost time are made inside the commands."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

app = typer.Typer(
    help="KV cache transfer between prefill and decode engines.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _root() -> None:
    """Keep `kvpush COMMAND` as the form of the command line, however few commands there are."""


@app.command()
def proxy(
    prefill: Annotated[
        list[str],
        typer.Option(
            help="A prefill server, http://HOST:PORT[,kv=HOST:PORT]; kv is its side channel, "
            "by default port 5600 of the same host. Repeatable.",
            metavar="URL",
        ),
    ],
    decode: Annotated[
        list[str],
        typer.Option(help="A decode server, http://HOST:PORT. Repeatable.", metavar="URL"),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    max_concurrent: Annotated[
        int, typer.Option(help="Requests at a time; more are refused with 503.")
    ] = 1_000,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body, in MiB.")] = 64,
    connect_timeout_s: Annotated[
        float, typer.Option(help="Longest wait for a connection to a server.")
    ] = 5.0,
    idle_timeout_s: Annotated[
        float, typer.Option(help="Longest silence of a decode server.")
    ] = 3_600.0,
    cool_off_s: Annotated[
        float, typer.Option(help="How long a server that can't be reached is left alone.")
    ] = 5.0,
    drain_s: Annotated[
        float, typer.Option(help="How long requests may go on after SIGTERM or Ctrl-C.")
    ] = 10.0,
    auth_key_file: Annotated[
        str,
        typer.Option(
            help="File with the auth key of the engines; without it KVPUSH_AUTH_KEY is taken."
        ),
    ] = "",
    access_log: Annotated[bool, typer.Option(help="Log every request.")] = False,
    verbose: Annotated[bool, typer.Option(help="Log why requests go to decode alone.")] = False,
) -> None:
    """Serve an OpenAI API in front of prefill and decode servers."""
    import asyncio

    from kvpush.auth import load_auth_key
    from kvpush.proxy.config import RouterConfig, parse_decode, parse_prefill
    from kvpush.proxy.server import serve

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("asyncio").setLevel(logging.INFO)
    try:
        config = RouterConfig(
            prefill=tuple(parse_prefill(text) for text in prefill),
            decode=tuple(parse_decode(text) for text in decode),
            host=host,
            port=port,
            max_concurrent=max_concurrent,
            max_body_bytes=max_body_mib * 1024 * 1024,
            connect_timeout_s=connect_timeout_s,
            idle_timeout_s=idle_timeout_s,
            cool_off_s=cool_off_s,
            drain_s=drain_s,
            access_log=access_log,
            auth=load_auth_key(auth_key_file),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    def ready(bound_port: int) -> None:
        typer.echo(
            f"kvpush proxy listens on http://{host}:{bound_port} "
            f"({len(prefill)} prefill, {len(decode)} decode)"
        )

    try:
        asyncio.run(serve(config, ready))
    except OSError as error:
        typer.echo(f"kvpush proxy: can't listen on {host}:{port}: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def selftest(
    backend: Annotated[str, typer.Option(help="NIXL backend.")] = "UCX",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small requests, few repetitions.")
    ] = False,
    limit_s: Annotated[float, typer.Option(help="Longest time the whole test may take.")] = 600.0,
) -> None:
    """Push KV between two processes over real NIXL and compare every byte.

    Exit status: 0 all right, 1 wrong bytes, 2 the test could not be finished.
    """
    from kvpush.selftest import command

    raise typer.Exit(command.run(backend, as_json=json, quick=quick, limit_s=limit_s))


def main() -> None:
    """Run the command line."""
    app()
