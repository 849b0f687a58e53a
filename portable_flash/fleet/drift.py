"""Which versions and tilings the devices of a model have, and which of them most do not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .facts import DeviceFacts


@dataclass
class Held:
    """aspect -> value -> devices that have it; all are numbers."""

    holders: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def counts(self, aspect: int) -> Counter[int]:
        return Counter({value: len(who) for value, who in self.holders[aspect].items()})

    def majority(self, aspect: int) -> int | None:
        """The value that more than half of the devices have."""
        counts = self.counts(aspect)
        value, most = counts.most_common(1)[0]
        return value if 2 * most > sum(counts.values()) else None

    def drifted(self) -> Iterator[tuple[int, int, int | None, list[int]]]:
        """(aspect, value, the majority's, devices) for every value that is not the majority's; without a majority for every value."""
        for aspect, values in self.holders.items():
            if len(values) > 1:
                majority = self.majority(aspect)
                yield from ((aspect, value, majority, who) for value, who in values.items() if value != majority)


def held(devices: Sequence[DeviceFacts], members: Sequence[int]) -> Held:
    """Of the devices with these numbers. A device that has two values of an aspect (a kernel that ran with two tilings) has both."""
    found = Held()
    for number in members:
        versions = devices[number].versions
        for aspect, value in zip(versions[::2], versions[1::2]):
            who = found.holders.setdefault(aspect, {}).setdefault(value, [])
            if not who or who[-1] != number:
                who.append(number)
    return found
