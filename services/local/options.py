"""What `headrace up` is told."""

from dataclasses import dataclass

from services.common.errors import SettingsError


@dataclass(frozen=True)
class UpOptions:
    """A deployment on one machine. ``keep`` None serves the model as it is."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    router_port: int = 8002
    prefill: int = 1
    decode: int = 1
    colocated: bool = False
    model: str = "smollm2-135m"
    keep: float | None = None
    codec: str = "auto"
    device: str = "auto"
    kv_format: str = "dense"

    def check(self) -> None:
        """Raises:
        SettingsError: the options contradict each other.
        """
        if self.codec not in ("auto", "raw", "splitzip"):
            raise SettingsError(f"--codec {self.codec}: one of auto, raw, splitzip")
        if self.device not in ("auto", "cpu", "cuda"):
            raise SettingsError(f"--device {self.device}: one of auto, cpu, cuda")
        if not self.colocated and self.prefill < 1:
            raise SettingsError("--prefill 0 leaves nobody to compute prompts; see --colocated")
        ports = (self.port, self.grpc_port, self.router_port)
        if len(set(ports)) < len(ports):
            raise SettingsError(f"the ports {ports} must differ")
