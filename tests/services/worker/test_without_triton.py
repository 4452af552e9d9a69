"""Workers on the CPU do not need Triton, which the CPU builds of torch do not install."""

import subprocess
import sys

import pytest

from runtime.kv.registry import COMPRESSED

pytestmark = pytest.mark.slow

_PROGRAM = """
import sys
sys.modules["triton"] = None  # an import raises ImportError

import services.decode.service, services.prefill.service
import services.offline.calibrate, services.offline.compress
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Engine, LocalExecutor
from runtime.models.build import build_model
from tests.runtime.tiny import tiny_checkpoint

for kv_format in sys.argv[1:]:
    model = build_model(tiny_checkpoint(), kv_format=kv_format)
    engine = Engine(LocalExecutor(model, EngineOptions(model.layout.plan.each(16), Limits(4, 4))))
    output = engine.step([Add(Request("a", (1, 2, 3), 3, SamplingParams(), max_tokens=4))])
    while engine.has_work:
        output = engine.step([])
    print(kv_format, len(output.tokens))
"""


@pytest.mark.long
def test_models_run_on_the_cpu_without_triton() -> None:
    formats = ["dense", *COMPRESSED]
    command = [sys.executable, "-c", _PROGRAM, *formats]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == formats
