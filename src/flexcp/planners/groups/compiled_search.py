"""Loops of the search: deal items to nodes and teams, and decide which of them are split by heads (compiled).

Items are those of :mod:`flexcp.planners.groups.compiled_dealing`; all loads are in its unit.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled
from flexcp.planners.groups.compiled_dealing import (
    ATTENTION,
    BIN,
    COLUMNS,
    HI,
    LO,
    PACE,
    SHARED,
    deal,
    limit_of,
    share_of,
)
from flexcp.planners.groups.compiled_team import split_by_heads

NODE, TEAM, SLACK, POURED, SPLIT, ROOM, LINEAR, EXCHANGE = range(8)
"""The settings of :func:`deal_to_ranks`: the ranks of a node and of a team, 1 over the share that a unit may be above
the mean, whether long items are poured, which items are split by heads, the most tokens of a rank (0: no limit), and
the costs of a token outside attention and of a split token.
"""
FEW, ALL, ONLY_SHARED = range(3)
"""The items that a team splits by heads: as few as are needed, all, or only those that other teams share."""
PASSES_OF_SHARED = 3
"""If only shared items are split, how often the rows of a shared item are passed more often than those of a whole one.

Its keys arrive from the ranks of the same node, and in two parts from other nodes.
"""


@compiled
def deal_to_ranks(items, speeds, settings):
    """Return (the items, cut where needed; the first rank and the number of ranks of each; times; whether units were
    short).

    ``speeds`` are those of all ranks. ``times[team]`` are how long a team takes for attention on its latest rank, and
    for everything else, relative to a rank of mean speed. Units were short if there were too few for the groups of long
    items (:func:`~flexcp.planners.groups.compiled_dealing.limit_of`).
    """
    size, team = settings[NODE], settings[TEAM]
    nodes, teams = len(speeds) // size, len(speeds) // team
    most = len(items) + 4 * (nodes + teams + len(speeds))
    found, where = np.empty((most, COLUMNS), np.int64), np.empty((most, 2), np.int64)
    times, used = np.zeros((teams, 2), np.int64), 0
    by_node, node_begins, short = dealt(items, speeds, size, settings)
    for node in range(nodes):
        mine = speeds[node * size : (node + 1) * size]
        of_node = by_node[node_begins[node] : node_begins[node + 1]]
        by_team, team_begins, short_here = dealt(of_node, mine, team, settings)
        short = short or short_here
        for number in range(size // team):
            of_team = by_team[team_begins[number] : team_begins[number + 1]]
            first = number * team
            pace = paces(mine[first : first + team], 1)
            of_team, rank, short_here = inside_team(of_team, mine[first : first + team], pace, settings)
            short = short or short_here
            for i in range(len(of_team)):
                split = team > 1 and rank[i] == team
                found[used] = of_team[i]
                where[used, 0] = node * size + first + (0 if split else rank[i])
                where[used, 1] = team if split else 1
                used += 1
            at = node * (size // team) + number
            team_times(times[at], of_team, rank, pace, settings)
            usual, own = speeds.sum() * team // len(speeds), mine[first : first + team].sum()
            for way in range(2):
                times[at, way] = share_of(times[at, way], usual, max(1, own))
    return found[:used], where[:used], times, short


@compiled
def inside_team(items, speeds, pace, settings):
    """Return (the items of a team, cut where needed; their ranks; whether ranks were short).

    The rank of an item is counted from the first of its team. It is the size of the team if the item is split by heads.
    """
    team = len(pace)
    if team == 1:
        return items, np.zeros(len(items), np.int64), False
    if settings[SPLIT] == ALL or len(items) == 0:
        return items, np.full(len(items), team, np.int64), False
    if settings[SPLIT] == FEW:
        rank = split_by_heads(items, pace, settings[LINEAR], settings[EXCHANGE], settings[SLACK])
        return items, rank, False
    shared = items[items[:, SHARED] == 1]
    table, _, short = dealt(items[items[:, SHARED] == 0], speeds, 1, settings)
    rank = np.full(len(shared) + len(table), team, np.int64)
    rank[len(shared) :] = table[:, BIN]
    return np.concatenate((shared, table)), rank, short


@compiled
def dealt(items, speeds, size, settings):
    """Return (the items, sorted by unit of ``size`` ranks; where those of each begin; whether units were short)."""
    units = len(speeds) // size
    begins = np.zeros(units + 1, np.int64)
    if units == 1:
        begins[1] = len(items)
        return items.copy(), begins, False
    times = PASSES_OF_SHARED if size > 1 and settings[SPLIT] == ONLY_SHARED else 1
    table = deal(items, paces(speeds, size), settings[SLACK], settings[POURED] == 1, settings[ROOM] * size, times)
    for i in range(len(table)):
        begins[table[i, BIN] + 1] += 1
    for unit in range(units):
        begins[unit + 1] += begins[unit]
    found, at = np.empty_like(table), begins[:-1].copy()
    for i in range(len(table)):
        found[at[table[i, BIN]]] = table[i]
        at[table[i, BIN]] += 1
    return found, begins, not limit_of(items, units, settings[SLACK])[2]


@compiled
def paces(speeds, size):
    """Return the speed of each unit of ``size`` ranks relative to the mean unit, in 1/``PACE``."""
    found = np.zeros(len(speeds) // size, np.int64)
    for rank in range(len(speeds)):
        found[rank // size] += speeds[rank]
    total = found.sum()
    for unit in range(len(found)):
        found[unit] = max(1, found[unit] * PACE * len(found) // total)
    return found


@compiled
def team_times(times, items, rank, pace, settings):
    """Write how long a team takes to ``times``: (attention of its latest rank, everything else).

    ``rank`` is what :func:`split_by_heads` returned for the items. Tokens of split items even out the tokens of ranks.
    """
    size = len(pace)
    attention, kept = np.zeros(size, np.int64), np.zeros(size, np.int64)
    split_attention, split_tokens, tokens, speed = 0, 0, 0, 0
    for i in range(len(items)):
        length = items[i, HI] - items[i, LO]
        tokens += length
        if size > 1 and rank[i] == size:
            split_attention += items[i, ATTENTION]
            split_tokens += length
        else:
            attention[rank[i]] += items[i, ATTENTION]
            kept[rank[i]] += length
    latest, most = 0, 0
    for r in range(size):
        speed += pace[r]
        latest = max(latest, (split_attention // size + attention[r]) * PACE // pace[r])
        most = max(most, kept[r] * PACE // pace[r])
    most = max(most, tokens * PACE // speed)
    times[0], times[1] = latest, settings[LINEAR] * most + settings[EXCHANGE] * split_tokens
