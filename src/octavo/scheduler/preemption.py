"""Whose blocks are taken when the pool is full, in which order, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ordered

from octavo.kv.block import Block
from octavo.kv.kv_cache import KVCache
from octavo.scheduler.sequence import Sequence, SequenceStatus


def exclusive_blocks(victims: Ordered[Sequence], enough: int, wanted: Collection[Block] = ()) -> int:
    """Blocks that become available at once if the victims lose all they hold: those that nobody else shares.

    Counting stops at `enough`. wanted: blocks whose content the taker goes on with, so that they are no gain.
    """
    num_blocks = 0
    for victim in victims:
        if num_blocks >= enough:
            break
        blocks = victim.block_table.blocks
        num_blocks += sum(block.ref_count == 1 and block not in wanted for block in blocks)
    return num_blocks


def still_ones_first(victims: Ordered[Sequence]) -> list[Sequence]:
    """Those who stand still anyhow (held, paused) before those who run: the fewest streams stop."""
    still = [one for one in victims if one.held or one.status is SequenceStatus.PAUSED]
    return still + [one for one in victims if not one.held and one.status is not SequenceStatus.PAUSED]


def take_tails(cache: KVCache, victims: Ordered[Sequence], num_blocks: int) -> dict[Sequence, int]:
    """Free tail blocks of the victims in turn until `num_blocks` are available, or nothing is left to take.

    What a victim keeps stays valid, and what it loses stays findable until it is overwritten. A shared block
    becomes available only when the last of those who share it lets go. So a first round takes only blocks
    with one reference; a second one, if that was not enough, also those that nobody but victims shares.

    Returns: who lost blocks, and how many computed tokens with them; the caller pauses them.
    """
    lost: dict[Sequence, int] = {}
    for shared_too in (False, True):
        held: Counter[Block] = Counter()
        if shared_too:
            held.update(block for victim in victims for block in victim.block_table.blocks)
        for victim in victims:
            lacking = num_blocks - cache.num_available
            if lacking <= 0:
                return lost
            keep = _keep(victim, lacking, held)
            if keep < len(victim.block_table):
                lost[victim] = lost.get(victim, 0) + _take_tail(cache, victim, keep)
    return lost


def _keep(victim: Sequence, lacking: int, held: Mapping[Block, int]) -> int:
    """Blocks a victim keeps when `lacking` more are to become available and its tail is taken one by one.

    Args:
        held: how many victims hold a block, at the beginning of the round; 1 for blocks that are not named.
    """
    keep, gained = len(victim.block_table), 0
    for block in reversed(victim.block_table.blocks):
        if gained == lacking or block.ref_count > held.get(block, 1):
            break
        gained += block.ref_count == 1
        keep -= 1
    return keep


def _take_tail(cache: KVCache, victim: Sequence, keep_blocks: int) -> int:
    before = victim.num_computed_tokens
    cache.free_tail(victim, keep_blocks)
    num_lost = before - victim.num_computed_tokens
    victim.num_lost_tokens += num_lost
    return num_lost
