"""Trace: write the passes of all ranks as Chrome trace events, which Perfetto (ui.perfetto.dev) shows side by side.

A rank is shown as a process with a track for its slots, and one each for compute, wait, pack, send and receive. A send
is drawn while the slot that posts it packs and posts. A receive is drawn from then until it was taken in; it arrived at
some time in between. An arrow joins the two. Messages that are posted at the beginning of the slot that waits for them
are drawn over that wait.
"""

from __future__ import annotations

from typing import Any

from flexcp.io.sizes import size
from flexcp.telemetry.records import PassRecord, StepRecord
from flexcp.telemetry.timestamps import host_times

TRACKS = {name: number for number, name in enumerate(("slots", "compute", "wait", "pack", "send", "receive"), 1)}
Event = dict[str, Any]


def rank_log(steps: list[StepRecord]) -> dict[str, Any]:
    """Return what a trace needs to know about this rank, as JSON values; this waits for the device."""
    return {
        "rank": next((s.rank for s in steps if s.rank is not None), 0),
        "steps": [
            {
                "number": step.number,
                "hash": step.plan.hash,
                "strategy": step.plan.strategy,
                "tokens": step.plan.batch.tokens,
                "compute_balance": step.compute_balance,
                "sent_bytes": step.sent_bytes(),
                "planning_wait_ns": step.planning_wait,
                "messages": {p.name: step.messages(p.mask, p.backward) for p in list(step.passes) if p.done},
                "ahead": {p.name: step.ahead(p.mask, p.backward) for p in list(step.passes) if p.done},
                "passes": [_pass_log(p) for p in list(step.passes) if p.done],
            }
            for step in steps
        ],
    }


def _pass_log(p: PassRecord) -> dict[str, Any]:
    """Return a pass as JSON values, with its time stamps on the host's clock, in nanoseconds."""
    return {"name": p.name, "number": p.number, "times": host_times(p.stamps), "spans": p.spans()}


def trace(logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trace of all ranks as a dict in Chrome's trace format.

    ``logs`` are the results of :func:`rank_log`, with the offsets of the ranks' clocks (``offset_ns``,
    ``offset_error_ns``).
    """
    starts = [p["times"][0] + log["offset_ns"] for log in logs for step in log["steps"] for p in step["passes"]]
    origin = min(starts, default=0)
    events = [event for log in logs for event in _rank_events(log, origin)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "flexcp",
            "largest clock error in us": max(log["offset_error_ns"] for log in logs) / 1e3,
            "steps": [_summary(logs, i) for i in range(min(len(log["steps"]) for log in logs))],
        },
    }


def _summary(logs: list[dict[str, Any]], back: int) -> dict[str, Any]:
    """Summarize a step over all ranks; ``back`` is 0 for the last step, 1 for the one before it, and so on."""
    steps = [log["steps"][-1 - back] for log in logs]
    spent = [_spent(step) for step in steps]
    compute = [s["compute"] for s in spent]
    total = sum(sum(s.values()) for s in spent)
    return {
        "number": steps[0]["number"],
        "hash": steps[0]["hash"],
        "strategy": steps[0]["strategy"],
        "planned compute balance": steps[0]["compute_balance"],
        "measured compute balance": max(compute) * len(compute) / sum(compute) if sum(compute) else 1.0,
        "wait share": sum(s["wait"] for s in spent) / total if total else 0.0,
        "bytes": sum(step["sent_bytes"] for step in steps),
    }


def _spent(step: dict[str, Any]) -> dict[str, int]:
    """Return the nanoseconds that a rank computed, waited and packed in a step, by activity."""
    found = {"compute": 0, "wait": 0, "pack": 0}
    for p in step["passes"]:
        for (_, what), a, b in zip(p["spans"], p["times"], p["times"][1:], strict=False):
            found[what] += b - a
    return found


def _rank_events(log: dict[str, Any], origin: int) -> list[Event]:
    """Return all trace events of a rank; ``origin`` is the time, in nanoseconds, at which the trace begins."""
    rank = log["rank"]
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    for name, number in TRACKS.items():
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}},
            {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}},
        ]
    for step in log["steps"]:
        for p in step["passes"]:
            at = [(t + log["offset_ns"] - origin) / 1e3 for t in p["times"]]
            events += _pass_events(rank, step, p, at)
    return events


def _pass_events(rank: int, step: dict[str, Any], p: dict[str, Any], at: list[float]) -> list[Event]:
    """Return the trace events of a pass; ``at`` are its time stamps in microseconds from the beginning of the trace."""
    events = []
    slots: dict[int, tuple[float, float]] = {}
    args = {"step": step["number"], "plan": step["hash"][:12], "pass": p["number"]}
    for (slot, what), begin, end in zip(p["spans"], at, at[1:], strict=False):
        name = f"{p['name']} stage {slot}"
        slots[slot] = (slots.get(slot, (begin, end))[0], end)
        if end > begin:
            events.append(_slice(rank, what, name, begin, end, args))
    events += [_slice(rank, "slots", f"{p['name']} stage {slot}", a, b, args) for slot, (a, b) in slots.items()]
    return events if len(at) == 2 else events + _message_events(rank, step, p, at, args)


def _message_events(
    rank: int, step: dict[str, Any], p: dict[str, Any], at: list[float], args: dict[str, Any]
) -> list[Event]:
    """Return a bar for each message that a rank sends or receives in a pass, and the ends of its arrow.

    ``at`` are the time stamps of the pass in microseconds, and ``args`` is what Perfetto shows of each event.
    """
    events = []
    for stage, (sends, receives) in list(enumerate(step["messages"][p["name"]]))[1:]:
        # Slot s has the stamps 3 s + 1 (transfers taken in), 3 s + 2 (later stages posted) and 3 s + 3 (work done).
        # Stage s is posted in slot s - ahead and taken in at the beginning of slot s. A stage that is not posted ahead
        # is posted and taken in between the same two stamps, so its sends and receives are drawn alike.
        ahead, taken = step["ahead"][p["name"]][stage], at[3 * stage + 1]
        slot = stage - ahead
        packed, sent = (at[3 * slot + 1], at[3 * slot + 2]) if ahead else (at[3 * stage], taken)
        awaited = sent if ahead else packed
        for peer, count in sends:
            what = args | {"bytes": count, "peer": peer, "stage": stage}
            events.append(_slice(rank, "send", f"{size(count)} to rank {peer}", packed, sent, what))
            events.append(_arrow("s", rank, "send", packed, _flow(step, p, stage, rank, peer)))
        for peer, count in receives:
            what = args | {"bytes": count, "peer": peer, "stage": stage}
            events.append(_slice(rank, "receive", f"{size(count)} from rank {peer}", awaited, taken, what))
            events.append(_arrow("f", rank, "receive", _inside(awaited, taken), _flow(step, p, stage, peer, rank)))
    return events


def _inside(begin: float, end: float) -> float:
    """Return a time just before ``end``, because Perfetto attaches an arrow to the slice that contains its end."""
    return max(begin, end - 0.001)


def _flow(step: dict[str, Any], p: dict[str, Any], stage: int, source: int, target: int) -> str:
    """Return the id that both ends of a message's arrow share."""
    return f"{step['number']}.{p['number']}.{stage}.{source}.{target}"


def _slice(rank: int, track: str, name: str, begin: float, end: float, args: dict[str, Any]) -> Event:
    """Return a bar on a track of a rank, from ``begin`` to ``end`` in microseconds."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": TRACKS[track],
        "cat": track,
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def _arrow(phase: str, rank: int, track: str, at: float, flow: str) -> Event:
    """Return the beginning (``phase`` "s") or the end ("f") of an arrow between ranks; ``flow`` is its id."""
    found = {"ph": phase, "pid": rank, "tid": TRACKS[track], "cat": "message", "name": "message", "ts": at, "id": flow}
    return found | ({"bp": "e"} if phase == "f" else {})
