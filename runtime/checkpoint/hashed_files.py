"""Identities of files whose content was hashed, so that no other process hashes them again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from runtime.errors import CheckpointError


@dataclass(frozen=True)
class FileIdentity:
    """Values of a file that change if it is replaced or written to.

    Attributes:
        path: as the process named it; not compared between processes, except for its last part.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the identity of a file; symbolic links are followed."""
        found = path.stat()
        return cls(str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def same_file(self, other: "FileIdentity") -> bool:
        mine = self.device, self.inode, self.size, self.mtime_ns
        return mine == (other.device, other.inode, other.size, other.mtime_ns)


@dataclass(frozen=True)
class HashedFiles:
    """The files of a checkpoint, and the model hash of their content.

    One rank of a worker hashes the files. The other ranks read the same files on the same host, and
    compare identities instead.
    """

    model_hash: str
    files: tuple[FileIdentity, ...]

    @classmethod
    def of(
        cls, paths: Sequence[Path], content_hash: Callable[[], str], known: Self | None
    ) -> "HashedFiles":
        """Return the files, hashed unless they are those of ``known``.

        Call it when all files are open, so that a file that was replaced since has another
        identity.

        Args:
            content_hash: computes the model hash.
            known: files that another process has hashed.

        Raises:
            CheckpointError: the files are not those of ``known``, or changed while they were
                hashed.
        """
        files = tuple(map(FileIdentity.of, paths))
        if known is not None:
            known._refuse_others(files)
            return known
        hashed = cls(content_hash(), files)
        for path, file in zip(paths, files, strict=True):
            if not file.same_file(FileIdentity.of(path)):
                raise CheckpointError(f"{path} changed while it was read")
        return hashed

    def _refuse_others(self, files: Sequence[FileIdentity]) -> None:
        mine = {Path(file.path).name: file for file in self.files}
        theirs = {Path(file.path).name: file for file in files}
        for name in sorted(mine.keys() | theirs.keys()):
            own, other = mine.get(name), theirs.get(name)
            if own is None or other is None:
                found = own or other
                assert found is not None
                raise CheckpointError(f"only one of two ranks of the worker reads {found.path}")
            if not own.same_file(other):
                raise CheckpointError(
                    f"ranks of the worker read different files: {other.path} is not, or no longer, "
                    f"the file that the first rank read as {own.path}"
                )
