"""Which bits are right, by the vote of devices that must agree: those whose digests have the same key, case and tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .facts import SEPARATOR, DeviceFacts, Names


@dataclass
class Votes:
    """minority: device -> questions in which it differs from a majority, (question, its answer, the majority's, voters in favour,
    voters). ties: set of devices -> questions without a majority. compared: devices that were asked what another one was asked.
    questions: device numbers of every question with two voters or more, by number."""

    minority: dict[int, list[tuple[int, int, int, int, int]]] = field(default_factory=dict)
    ties: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    questions: dict[int, list[int]] = field(default_factory=dict)


def vote(devices: Sequence[DeviceFacts]) -> Votes:
    """A majority is more than half of the voters; without one nobody is right and nobody is wrong."""
    ballots: dict[int, dict[int, int]] = {}  # question -> device -> answer
    for number, device in enumerate(devices):
        for question, answer in zip(device.questions, device.answers):
            # a device that answers one question in two ways has no answer that another could share
            ballot = ballots.setdefault(question, {})
            ballot[number] = answer if ballot.get(number, answer) == answer else -1
    result = Votes()
    for question, ballot in ballots.items():
        if len(ballot) < 2:
            continue
        result.compared.update(ballot)
        result.questions[question] = sorted(ballot)
        counts = Counter(a for a in ballot.values() if a != -1)
        answer, favour = counts.most_common(1)[0] if counts else (-1, 0)
        if favour == len(ballot):
            continue
        if 2 * favour > len(ballot):
            for number, given in ballot.items():
                if given != answer:
                    result.minority.setdefault(number, []).append((question, given, answer, favour, len(ballot)))
        else:
            result.ties.setdefault(tuple(sorted(ballot)), []).append(question)
    return result


def question_text(names: Names, question: int) -> str:
    """Case and tensor of a question."""
    _, case, tensor, backend = [*names[question].split(SEPARATOR), "", "", ""][:4]
    return f"{case}/{tensor} ({backend})"


def short(names: Names, answer: int) -> str:
    return "two answers" if answer == -1 else names[answer][:12]
