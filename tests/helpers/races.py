"""Finds races in the log of a rank with torch's own detector, `torch.cuda._sanitizer`, which needs no GPU."""

from collections.abc import Sequence

from torch.cuda._sanitizer import EventHandler, UnsynchronizedAccessError

from helpers.device_log import COMPUTE, Access


def find_races(accesses: Sequence[Access]) -> list[str]:
    """Return the accesses that nothing orders after an earlier one of the same memory, where one of them writes.

    An operation starts after what is in the compute stream so far; only a wait orders the compute stream after it.
    """
    detector, streams, races = EventHandler(), {COMPUTE: 0}, []
    for posted, access in enumerate(accesses):
        event = access.event
        if event.kind == "wait":
            detector._handle_event_wait(-event.number, 0)
            continue
        stream = streams.setdefault(event.stream, len(streams))
        if stream:
            detector._handle_event_creation(posted)
            detector._handle_event_record(posted, 0)
            detector._handle_event_wait(posted, stream)
        names: dict[int, list[str]] = {address: [] for address in access.reads | access.writes}
        errors = detector._handle_kernel_launch(
            stream, set(access.reads - access.writes), set(access.writes), set(), access.name, names
        )
        for error in errors:
            assert isinstance(error, UnsynchronizedAccessError)
            races.append(f"{access.name} after {error.previous_access.operator}")
        if event.ranks:
            detector._handle_event_creation(-event.number)
            detector._handle_event_record(-event.number, stream)
    return races
