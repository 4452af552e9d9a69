"""Send one completion to a gateway, which may still wait for its workers, and check the answer."""

import json
import os
import time
import urllib.error
import urllib.request

WAIT_S = float(os.environ.get("WAIT_S", 240))


def call(path, body=None):
    """Return the JSON of a response of the gateway."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["URL"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_until_ready():
    """Wait until the gateway can serve requests; exit with its reason after `WAIT_S` seconds."""
    reason = "no attempt"
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            return call("/ready")
        except urllib.error.HTTPError as error:
            reason = error.read().decode()
        except OSError as error:
            reason = str(error)
        time.sleep(2)
    raise SystemExit(f"the gateway is not ready: {reason}")


wait_until_ready()
model = call("/v1/models")["data"][0]["id"]
answer = call(
    "/v1/completions", {"model": model, "prompt": "The capital of France is", "max_tokens": 8}
)
print(json.dumps(answer))
if not answer["choices"][0]["text"]:
    raise SystemExit("the completion is empty")
