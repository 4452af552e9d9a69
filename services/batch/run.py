"""A run of a batch, with its progress on stderr and a summary on stdout."""

import asyncio
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.batch.answers import Answer, AnswerFile, open_answers
from services.batch.requests import BatchFileError, RequestFile, check_requests, open_requests
from services.batch.sender import Server, send_all
from services.common.terminal import diagnostics, results


def answer_file(file: Path, output: Path, server: Server) -> int:
    """Send the requests of a file that ``output`` does not answer yet, and append their answers.

    The whole file is checked before any request is sent.

    Returns:
        How many requests have an error.

    Raises:
        BatchFileError: if one of the files is invalid, or ``file`` changes while it is sent.
        BatchStopped: if the server cannot be used. The answers until then are in ``output``.
    """
    with open_requests(file) as requests:
        version, requested = requests.version, check_requests(requests)
        with open_answers(output, requested) as answers:
            before = len(answers.answered)
            asyncio.run(_run(server, requests, answers, len(requested)))
        if requests.version != version or answers.answered != requested:
            raise BatchFileError(f"{file}: the file changed while its requests were sent")
        summary = f"answered {len(answers.answered)} requests, {answers.failed} with an error"
        earlier = f" ({before} in earlier runs)" if before else ""
        results().print(f"{summary}{earlier}: {output}", markup=False)
        return answers.failed


async def _run(server: Server, requests: RequestFile, answers: AnswerFile, total: int) -> None:
    """Send the requests that are not answered yet, and show the progress on stderr."""
    left = (request for request in requests if request.custom_id not in answers.answered)
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[failed]}"))
    with Progress(*columns, console=diagnostics()) as progress:
        task = progress.add_task("", total=total, completed=len(answers.answered), failed="")

        def done(answer: Answer) -> None:
            answers.add(answer)
            failed = f"{answers.failed} failed" if answers.failed else ""
            progress.update(task, advance=1, failed=failed)

        await send_all(server, left, done)
