"""A fixed prompt that shows whether the worker or a request causes logits that are not finite."""

import structlog

from runtime.core.request import Request, SamplingParams
from runtime.engine import Add, Engine, StepOutput
from runtime.errors import NotFinite
from services.worker.engine_thread import EngineThread

log = structlog.get_logger()

_ID = "self-test"
_TOKENS = 8


def check_logits(engine: Engine) -> None:
    """Compute the fixed prompt on an engine without other requests.

    Raises:
        NotFinite: its logits are not finite.
    """
    output = engine.step([Add(_request(engine.executor.shape.config.vocab_size))])
    while engine.has_work and not output.refused:
        output = engine.step([])
    for _, fault in output.refused:
        if isinstance(fault, NotFinite):
            raise NotFinite(f"in a test prompt, {fault}: the weights or the device may be damaged")


class SelfTest:
    """Computes one token of the fixed prompt after a request whose logits were not finite.

    A request may have such logits on a sound worker, because activations overflow. If it made the
    worker unready, clients could stop every worker. If the fixed prompt has no finite
    logits either, weights or device are damaged, and the worker must get no requests.

    Attributes:
        failure: why the worker must get no requests, or None.
    """

    def __init__(self, engine: EngineThread, vocab_size: int) -> None:
        self._engine = engine
        self._request = _request(vocab_size)
        self._running = False
        self.failure: str | None = None

    def start(self) -> None:
        """Start the test, unless it is running."""
        if not self._running:
            self._running = True
            self._engine.submit(Add(self._request))

    def observe(self, output: StepOutput) -> int:
        """Process the output of a step, and start the test if logits were not finite.

        Returns:
            Number of requests that ended because their logits were not finite.
        """
        faults = dict(output.refused)
        mine = faults.pop(_ID, None)
        if mine is not None:
            self._running = False
            if isinstance(mine, NotFinite):
                self.failure = "the logits of a test prompt are not finite"
                log.error("self-test failed", reason=str(mine))
        elif _ID in output.ended:
            self._running = False
            self.failure = None
        affected = sum(isinstance(fault, NotFinite) for fault in faults.values())
        if affected:
            self.start()
        return affected


def _request(vocab_size: int) -> Request:
    tokens = tuple(token % vocab_size for token in range(_TOKENS))
    return Request(_ID, tokens, len(tokens), SamplingParams(), max_tokens=1)
