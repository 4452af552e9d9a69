"""The command `headrace batch`."""

from pathlib import Path
from typing import Annotated

import typer

EXIT_FAILED_REQUESTS = 1


def batch(
    file: Annotated[
        Path, typer.Argument(metavar="INPUT", help="JSON Lines with custom_id, method, url, body")
    ],
    output: Annotated[Path, typer.Option(help="JSON Lines to write the answers to")],
    url: Annotated[str, typer.Option(help="server with OpenAI's API")] = "http://127.0.0.1:8000",
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="maximum number of requests in progress")
    ] = 32,
    retries: Annotated[
        int, typer.Option(min=0, max=100, help="maximum number of retries of a request")
    ] = 10,
    timeout: Annotated[
        float, typer.Option(min=1, help="time limit of each attempt, in seconds")
    ] = 3600.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="HEADRACE_BATCH_API_KEY", help="bearer token")
    ] = None,
) -> None:
    """Answer the requests of a file in the format of OpenAI's Batch API.

    If it is interrupted, the same command continues with the requests that are not answered yet.
    """
    from services.batch.run import answer_file
    from services.batch.sender import Server

    server = Server(url, api_key, concurrency, retries, timeout)
    if answer_file(file, output, server):
        raise typer.Exit(EXIT_FAILED_REQUESTS)
