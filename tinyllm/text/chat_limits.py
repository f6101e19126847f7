"""What a chat template may spend: every loop, call, comparison and operator pays here for the work it asks for.

A template from a model file is a program by a stranger; with a budget a hostile one ends with an error instead of
filling the memory or the day. Costs are counted, not timed, so that the verdict is the same on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from jinja2 import TemplateError

BASE_BUDGET = 32_000_000  # the unit is one character made, about a nanosecond and a byte or two
BUDGET_PER_INPUT = 128  # so that a template may go through a long conversation often
STEP_COST = 16  # of a loop iteration
CALL_COST = 256  # of a call or filter
ITEM_COST = 48  # of an item that a filter looks at
ELEMENT_COST = 8  # of an element in a container
READS_PER_UNIT = 16  # characters looked at for the price of one made
MAX_BITS = 4096  # of an integer product or power
MAX_NUMBER = 10_000  # as a width, precision or length


class BudgetError(TemplateError):
    """The template wanted more work or memory than any conversation needs."""


class Budget:
    """What one rendering may still spend; `input_size` is the weight of the messages and other variables."""

    def __init__(self, input_size: int = 0):
        self._left = BASE_BUDGET + BUDGET_PER_INPUT * input_size
        self._weighed: dict[int, tuple[Any, int]] = {}

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise BudgetError("it does more work than a conversation can need")

    def weigh(self, value: Any) -> int:
        """Size of `value` written out: a part counts as often as it is reached, so that shared parts cannot explode."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, range):
            return ELEMENT_COST * len(value)
        if not isinstance(value, list | tuple | dict | set):
            return 1
        known = self._weighed.get(id(value))
        if known is None:
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known = value, ELEMENT_COST * (1 + len(parts)) + sum(map(self.weigh, parts))
            self._weighed[id(value)] = known  # holds the value, so that its id stays its own
        return known[1]

    def charge(self, value: Any) -> Any:
        """`value`, which was just made, paid for by its whole size."""
        self.spend(self.weigh(value))
        return value

    def charge_reading(self, value: Any) -> Any:
        """`value`, paid for as something that is compared or searched."""
        self.spend(1 + self.weigh(value) // READS_PER_UNIT)
        return value

    def charge_loop(self, items: Iterable[Any], cost: int = STEP_COST) -> Iterable[Any]:
        """`items`, its iterations paid for: at once if their number is known, else one by one."""
        if isinstance(items, Sized):
            self.spend(cost * len(items))
            return items
        return self._charge_steps(items, cost)

    def _charge_steps(self, items: Iterable[Any], cost: int) -> Iterator[Any]:
        for item in items:
            self.spend(cost)
            yield item

    def charge_subject(self, name: str, subject: Any) -> Any:
        """`subject`, to which the filter or test `name` is applied, its items paid for if it has some."""
        if isinstance(subject, str | bytes) or name in _CONSTANT_TIME or not isinstance(subject, Iterable):
            return subject
        return self.charge_loop(subject, ITEM_COST) if isinstance(subject, Sized | Iterator) else subject

    def before_operator(self, operator: str, left: Any, right: Any) -> None:
        """Pay for, or refuse, `left operator right`, one of + * ** %."""
        if operator == "%" and isinstance(left, str | bytes):
            check_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = {"*": bits + right.bit_length(), "**": bits * abs(right)}.get(operator, 0)
            if bits > MAX_BITS:
                raise BudgetError("its numbers grow too large")
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                self.spend(max(times, 0) * self.weigh(value))

    def before_call(self, name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Pay for reading what a call is given; refuse the filters and methods that make too much out of little.

        `subject` is what a filter is applied to, or the owner of a method, or None.
        """
        arguments = [*args, *kwargs.values()]
        read = sum(map(self.weigh, arguments))
        if isinstance(subject, str) or name not in _CONSTANT_TIME:
            read += self.weigh(subject)
        self.spend(CALL_COST + read // READS_PER_UNIT)
        if name in _SIZED_BY_NUMBER:
            check_numbers(arguments)
        if name == "format":
            check_format(subject, arguments)
        elif name == "tojson":
            self.spend(self.weigh(subject) * (1 + sum(map(self._extent, arguments))))
        elif name == "lipsum":
            self.spend(1024 * math.prod(map(self._extent, arguments)))
        elif name == "join" and args and isinstance(args[0], list):
            self.spend(len(subject) * len(args[0]))
        elif name in _REPEATING and isinstance(subject, str | bytes):
            self.spend(_REPEATING[name](subject, args) * sum(map(self._extent, arguments)))

    def _extent(self, argument: Any) -> int:
        return abs(argument) if isinstance(argument, int) else self.weigh(argument)


def check_numbers(values: Iterable[Any]) -> None:
    """Refuse numbers that would make a single call fill the memory."""
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values):
        raise BudgetError(f"it asks for a width or count above {MAX_NUMBER}")


def check_format(template: Any, values: Any) -> None:
    """Refuse `%` formats with huge widths, written in the format or given by `*`."""
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    conversions = " ".join(re.findall(r"%[^a-zA-Z%]*", text))
    check_digits(conversions)
    if "*" in conversions:
        check_numbers(values if isinstance(values, list | tuple) else [values])


def check_digits(spec: str) -> None:
    """Refuse a format specification with a huge width or precision."""
    check_numbers(int(digits[:10]) for digits in re.findall(r"[0-9]+", spec))


def _replacements(subject: Any, args: Sequence[Any]) -> int:
    old = args[0] if args else None
    return subject.count(old) if old and isinstance(old, str | bytes) else len(subject) + 1


_CONSTANT_TIME = frozenset({"length", "count", "first", "last", "default", "d", "defined", "undefined", "none"})

_SIZED_BY_NUMBER = frozenset(
    {
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "to_bytes",
        "indent",
        "batch",
        "slice",
        "round",
        "lipsum",
        "tojson",
    }
)

_REPEATING: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    "replace": _replacements,
    "indent": lambda subject, _: len(subject.splitlines()) + 1,
    "expandtabs": lambda subject, _: len(subject),
    "wordwrap": lambda subject, _: len(subject),
    "urlize": lambda subject, _: len(subject),
    "translate": lambda subject, _: len(subject),
}
"""Methods and filters that put their arguments into a text again and again, with the number of places."""
