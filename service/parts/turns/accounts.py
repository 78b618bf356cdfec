"""Counts what each model has used of a device, and how much of the device is in use.

Pure: it holds no clock and no process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

_STILL_ACTIVE_S = 0.25
"""A model counts as active for this long after its last batch. Until then no other model gets a
batch ahead early, so that its next request waits for no more than the batch that runs."""
_MOST_SAVED_S = 1.0
"""The most that a model which is always busy can save of its share, since its workers cannot use
it all. Without a bound, one that gets more workers could keep all others waiting for long."""
_LATE, _LATE_S = 0.5, 0.01
"""How much longer than expected a batch may take, as a share and in seconds, before others wait
for it no longer."""


@dataclass(slots=True, eq=False)
class Turn:
    """The use of one or several devices by one batch."""

    widths: Mapping["SharedDevice", int]
    """The places that it uses of each device."""
    expected_s: float
    """The time that it should take, which its model was charged."""
    ends_at: float
    """When it should end, by what is known of its worker."""
    is_counted: bool = False
    """It uses its places. A batch that was sent ahead uses none before it begins."""

    @property
    def late_at(self) -> float:
        """When its end counts as unknown: its worker may hang."""
        return self.ends_at + self._patience_s

    @property
    def longest_s(self) -> float:
        """The longest for which others wait for its end."""
        return self.expected_s + self._patience_s

    @property
    def _patience_s(self) -> float:
        return max(_LATE_S, _LATE * self.expected_s)


@dataclass(slots=True, eq=False)
class Account:
    """The use that one model has made of one device."""

    level_s: float
    """Seconds of the device that it has had, divided by its share, and counted so that models that
    were idle meanwhile have saved nothing."""
    shares: list[float] = field(default_factory=list)
    """The shares that its members came with, the newest last."""
    num_turns: int = 0
    """Batches that its workers hold."""
    num_waiting: int = 0
    """Claims of its pools that wait."""
    active_at: float = -inf
    """When it last held a batch."""

    @property
    def share(self) -> float:
        """The model's weight. If its newest version is refused, that of the one before counts."""
        return self.shares[-1]

    def is_active(self, now: float) -> bool:
        """Return whether it uses the device, waits for it, or did so a moment ago."""
        return bool(self.num_turns or self.num_waiting or now < self.active_at + _STILL_ACTIVE_S)


@dataclass(slots=True, eq=False)
class SharedDevice:
    """One device: its places, the accounts of its models, and the turns that they hold.

    The model with the lowest level goes first. A level rises by the time of each batch, divided by
    the model's share. This is start-time fair queueing (Goyal, Vin and Cheng, "Start-time fair
    queueing", 1996), the limit of deficit round robin as its quantum goes to nothing. Batches of
    different models differ too much in time for a quantum: with one as long as the longest batch, a
    model of short batches would have many in a row.
    """

    places: int
    """Threads that the cores can run at once; 1 for a GPU."""
    is_contested: bool = False
    """Several models are here, and their workers have more threads than there are places."""
    accounts: dict[str, Account] = field(default_factory=dict)
    turns: set[Turn] = field(default_factory=set)
    level_s: float = 0.0
    """The level at which the last turn was given. It never falls."""

    def open(self, model: str, share: float) -> Account:
        """Return the account of a model, which has one more member from now on."""
        account = self.accounts.setdefault(model, Account(self.level_s))
        account.shares.append(share)
        return account

    def close(self, model: str, share: float) -> None:
        """Remove a member of a model that came with this share."""
        account = self.accounts[model]
        account.shares.remove(share)
        if not account.shares:
            del self.accounts[model]

    def wait(self, account: Account) -> None:
        """Count a model as waiting from now on. One that was idle has saved nothing."""
        if not any(each.num_turns or each.num_waiting for each in self.accounts.values()):
            # No model had a use for the device, so none has to make up for its last batch.
            self.level_s = max(each.level_s for each in self.accounts.values())
        saved_s = _MOST_SAVED_S if account.num_turns or account.num_waiting else 0.0
        account.level_s = max(account.level_s, self.level_s - saved_s)
        account.num_waiting += 1

    def lag_s(self, account: Account) -> float:
        """Return how much more a model has had than the one that went last; lowest goes first."""
        return account.level_s - self.level_s

    def is_free_for(self, account: Account, now: float) -> bool:
        """Return whether no other model has a use for the device."""
        return not self.is_contested or not any(
            other is not account and other.is_active(now) for other in self.accounts.values()
        )

    def num_free(self, now: float, by: float) -> int:
        """Return the places that will be free at a moment.

        Only one batch for each place may have been sent while another one was about to end there.
        Otherwise many batches that take no time would be about to end, and all go at once.
        """
        taken = held = 0
        for turn in self.turns:
            if turn.is_counted:
                taken += turn.widths[self] * (turn.ends_at > by)
                held += turn.widths[self] * (turn.late_at > now)
        return min(self.places - taken, 2 * self.places - held)

    def has_room_at(self, after: float, by: float) -> float:
        """Return when a place should next come free, seen from a moment; infinite if unknown.

        Args:
            after: The present.
            by: The moment by which places had to be free.
        """
        ends = [turn.ends_at for turn in self.turns if turn.is_counted and turn.ends_at > by]
        lates = [turn.late_at for turn in self.turns if turn.is_counted and turn.late_at > after]
        return min(min(ends, default=inf) - (by - after), min(lates, default=inf))

    def begin(self, account: Account, turn: Turn) -> None:
        """Charge a model for what a batch should take."""
        account.level_s = max(account.level_s, self.level_s - _MOST_SAVED_S)
        self.level_s = max(self.level_s, account.level_s)
        account.level_s += turn.expected_s * turn.widths[self] / account.share
        account.num_turns += 1
        self.turns.add(turn)

    def end(self, account: Account, turn: Turn, took_s: float, now: float) -> None:
        """Charge a model for what its batch took beyond that, or give back the rest."""
        width = turn.widths[self]
        account.level_s += (took_s - turn.expected_s) * width / account.share
        account.num_turns -= 1
        account.active_at = now
        self.turns.discard(turn)
