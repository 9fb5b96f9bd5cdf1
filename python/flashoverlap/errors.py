"""Exceptions. All are ``Error``; each is also the built-in class that fits, so that ``except ValueError`` works."""

from __future__ import annotations

import builtins


class Error(Exception):
    """What this library raises. The message says what was wrong, what was expected, and where."""


class BadArgumentError(Error, ValueError):
    """The call is wrong: correct the shape, option or file that the message names."""


class ArgumentTypeError(Error, TypeError):
    """An argument is no array, or its elements have a type that cannot be used."""


class UnsupportedError(Error, NotImplementedError):
    """The call is right, but this build or machine cannot carry it out."""


class OutOfMemoryError(Error, MemoryError):
    """Less memory is available than the call needs; the message gives both in bytes."""


class FileError(Error, OSError):
    """A file cannot be read, written or understood."""


class DeviceError(Error, RuntimeError):
    """A CUDA or driver call failed."""


class CommunicationError(Error, ConnectionError):
    """A rank failed, or the ranks' calls do not match; make a new communicator to go on."""


class TimeoutError(Error, builtins.TimeoutError):
    """A rank did not arrive in time; make a new communicator to go on."""


class InternalError(Error, RuntimeError):
    """An invariant of this library broke: a defect, please report it."""


class RankError(Error, RuntimeError):
    """A rank of ``run_ranks`` raised: ``rank`` says which, ``__cause__`` is what it raised."""

    def __init__(self, rank: int, world_size: int, cause: BaseException) -> None:
        super().__init__(f"rank {rank} of {world_size}: {type(cause).__name__}: {cause}")
        self.rank = rank
        self.world_size = world_size
