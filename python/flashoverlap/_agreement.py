"""What ranks do together before a call of one of the functions, and what they keep of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ArgumentTypeError, BadArgumentError, CommunicationError
from .ranks import Communicator

Value = TypeVar("Value")

_MOST_OPERATORS = 32  # Kept per communicator by the functions.


def require_communicator(comm: Any) -> None:
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"comm is a {type(comm).__name__}; expected a flashoverlap.Communicator")


def agree(comm: Communicator, operation: str, work: Callable[[], tuple[Value, str, str]]) -> tuple[Value, list[str]]:
    """Runs ``work`` on each rank: it returns a value, what must be equal on all ranks, and what may differ.

    Returns the value and the latter of all ranks. When it raised on one rank, all ranks raise; when ranks differ, too.
    So a wrong argument on one rank is an error everywhere, before anything is computed.
    """
    error: Exception | None = None
    try:
        value, common, own = work()
        message = f"ok\0{common}\0{own}"
    except Exception as caught:
        error = caught
        message = f"error\0{type(caught).__name__}: {caught}\0"
    if comm.size == 1:
        if error is not None:
            raise error
        return value, [own]
    answers = [answer.decode().split("\0") for answer in comm.exchange(message.encode())]
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer[0] != "ok":
            text = answer[1] if len(answer) > 1 else "it makes another call"
            raise CommunicationError(f"rank {rank} cannot take part in {operation}: {text}")
    for rank, answer in enumerate(answers):
        if answer[1] != answers[0][1]:
            raise BadArgumentError(f"ranks disagree: rank 0 calls {answers[0][1]}, rank {rank} calls {answer[1]}")
    return value, [answer[2] for answer in answers]


def operator_for(comm: Communicator, key: Any, make: Callable[[], Any]) -> Any:
    """The operator of an agreed key, least recently used ones forgotten. All ranks hit, or all miss."""
    operators: dict[Any, Any] = comm._operators
    operator = operators.pop(key, None)
    if operator is None:
        while len(operators) >= _MOST_OPERATORS:
            operators.pop(next(iter(operators)))
        operator = make()
    operators[key] = operator
    return operator
