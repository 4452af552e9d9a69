"""Generate the protobuf and gRPC stubs of ``headrace.v1`` beside their schemas.

Hatch runs this build hook at installation. To run it by hand: ``python proto/build_stubs.py``.
"""

import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside of a build environment
    BuildHookInterface = object  # type: ignore[assignment,misc]


def generate(source_root: Path) -> None:
    """Write ``*_pb2.py``, ``*_pb2_grpc.py`` and their ``.pyi`` beside each schema."""
    import grpc_tools
    from grpc_tools import protoc

    schemas = sorted(str(p) for p in source_root.glob("headrace/v1/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    bin_dir = Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-{name}={path}"
        for name in ("mypy", "mypy_grpc")
        if (path := bin_dir / f"protoc-gen-{name}").exists()
    ]
    arguments = [
        "protoc",
        *plugins,
        f"-I{source_root}",
        f"-I{well_known}",
        f"--python_out={source_root}",
        f"--grpc_python_out={source_root}",
        f"--mypy_out={source_root}",
        f"--mypy_grpc_out={source_root}",
        *schemas,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed, see its messages above; the schemas are {schemas}")


class StubBuildHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Hatch hook that generates the stubs before any wheel, editable or not, is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        generate(Path(self.root) / "proto")


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent)
