"""Find out which Triton kernels some code launches, without compiling or launching them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class KernelSource:
    """All that determines one compiled kernel. It can be pickled.

    Attributes:
        module, name: module of the kernel function, and its name in the module.
        gluon: whether the kernel is written in Gluon.
        function_key: Triton's cache key of the function. Triton computes it when the function is
            first needed, and it depends on which functions the process needed before. A process
            that compiles for another one must therefore take over its key.
        signature, constants, attributes: arguments of `triton.compiler.ASTSource`: types of the
            arguments, compile-time constants, and properties such as divisibility by 16.
        target: target GPU, a `triton.backends.compiler.GPUTarget`.
        options: launch options, such as ``num_warps``.
    """

    module: str
    name: str
    gluon: bool
    function_key: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    target: Any
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile the kernel into Triton's cache on disk, unless it is there. Needs no GPU."""
        import triton
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        kernel: Any = import_module(self.module)
        for part in self.name.split("."):
            kernel = getattr(kernel, part)
        kernel.hash = self.function_key
        source = (GluonASTSource if self.gluon else ASTSource)(
            kernel, self.signature, self.constants, self.attributes
        )
        triton.compile(source, target=self.target, options=self.options)


@contextmanager
def launches_skipped(on_kernel: Callable[[KernelSource], None]) -> Iterator[None]:
    """Skip launches of kernels that are not compiled in this process, on all threads.

    Outputs of these kernels are not written. Kernels that this process has compiled or loaded are
    launched as usual. Later processes find the kernels in Triton's cache only if they need them in
    the same order (see `KernelSource.function_key`).

    Args:
        on_kernel: called once for each different kernel that is skipped.
    """
    found: set[tuple[JITFunction, str]] = set()

    def skip(
        kernel: JITFunction,
        key: str,
        signature: dict[str, Any],
        device: int,
        constants: dict[tuple[int, ...], Any],
        options: Any,
        attributes: dict[tuple[int, ...], Any],
        _warmup: bool,
    ) -> None:
        if (kernel, key) in found:
            return
        found.add((kernel, key))
        function, target = kernel.fn, kernel.device_caches[device][2]
        on_kernel(
            KernelSource(
                function.__module__, function.__qualname__, kernel.is_gluon(), kernel.cache_key,
                signature, constants, attributes, target, dict(options.__dict__),
            )
        )  # fmt: skip

    # Triton calls this method if it has no kernel for the arguments, and launches nothing if it
    # returns None. Its hook for this purpose cannot be used: before it calls the hook, it encodes
    # the constants as JSON, which fails for those of our kernels.
    compile_kernel = JITFunction._do_compile
    JITFunction._do_compile = skip
    try:
        yield
    finally:
        JITFunction._do_compile = compile_kernel
