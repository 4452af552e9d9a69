"""instructor: models of pydantic as answers."""

from typing import Any

import call
import instructor
from openai import OpenAI
from person import SENTENCE, Person


def answer(mode: instructor.Mode) -> dict[str, Any]:
    """Return what the model says about a sentence."""
    openai = OpenAI(base_url=f"{call.URL}/v1", api_key=call.KEY, max_retries=0)
    person = instructor.from_openai(openai, mode=mode).chat.completions.create(
        model=call.MODEL,
        messages=[{"role": "user", "content": SENTENCE}],
        response_model=Person,
        temperature=0,
        max_tokens=100,
        max_retries=1,
    )
    return person.model_dump()


def json_schema() -> dict[str, Any]:
    """Constrain the answer by a schema."""
    return answer(instructor.Mode.JSON_SCHEMA)


def tools() -> dict[str, Any]:
    """Force a call, which is the default."""
    return answer(instructor.Mode.TOOLS)


if __name__ == "__main__":
    call.run(json_schema, tools)
