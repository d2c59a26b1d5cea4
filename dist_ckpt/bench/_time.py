"""How the time of a case is divided among those who are measured in it. Layer 7, pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OWN_ROUNDS", "choose_peers", "too_slow"]

#: Rounds that count for the limits and for dist_ckpt, however little time is left.
OWN_ROUNDS = 5
#: A peer whose first turn takes a larger share of the case's time makes no other.
_SLOW_SHARE = 0.25


def too_slow(turn_secs: float, case_secs: float) -> str | None:
    """Return why a peer makes no round that counts, None where it does."""
    if turn_secs <= _SLOW_SHARE * case_secs:
        return None
    return f"too slow: {turn_secs:.0f} s a round"


def choose_peers(
    number: int,
    rounds_left: int,
    left_secs: float,
    own_secs: float,
    peer_secs: Mapping[str, float],
) -> set[str] | None:
    """Return which peers make a turn in a round after the first that counts; None: it is over.

    The limits and dist_ckpt come first in all rounds to come; what they leave goes to the peers,
    to the quick ones first.

    Args:
        number: Of the round, from 2 on.
        rounds_left: How many are wanted yet, with this one.
        left_secs: Time left to the case.
        own_secs: What the limits and dist_ckpt take in a round.
        peer_secs: What each peer takes.
    """
    if number > OWN_ROUNDS and left_secs < own_secs:
        return None
    spare = left_secs - rounds_left * own_secs
    chosen: set[str] = set()
    for name in sorted(peer_secs, key=lambda name: peer_secs[name]):
        spare -= peer_secs[name]
        if spare < 0:
            break
        chosen.add(name)
    return chosen
