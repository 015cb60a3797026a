"""A closed interpreter for the pickles inside PyTorch files.

It knows the dozen things that a state dict is made of and nothing else. Naming a class pushes an inert `Global`;
calling one looks its name up in a fixed table; whatever is not in the table is refused by name. Nothing that a file
names is ever imported, and no method of a value from the file is ever called. Time and memory are bounded by counts:
opcodes, nesting of marks, bytes of the pickle and of each string.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardzoo.convert.file_bytes import FileBytes
from shardzoo.convert.pickle_calls import (
    RESAVE,
    Global,
    PickledSet,
    Refused,
    StorageRef,
    build,
    call,
    call_cost,
    dict_key,
    persistent,
)
from shardzoo.errors import InputError

MAX_PICKLE_BYTES = 64 << 20
MAX_STRING_BYTES = 16 << 20
MAX_INTEGER_BYTES = 64
MAX_LINE_BYTES = 1024
# A tensor of a state dict takes about 32 opcodes, 8 of which remember a value: room for 180,000 tensors in one file.
MAX_OPCODES = 6_000_000
MAX_MEMO = 2_000_000
MAX_MARKS = 1000
# Calls that copy what they are given (one opcode, many items) are counted by what they copy.
MAX_CALL_COST = 8_000_000


class Cursor:
    """Reads forward through part of a file in blocks."""

    BLOCK = 1 << 20

    def __init__(self, data: FileBytes, start: int, stop: int):
        self._data, self._stop = data, stop
        self._block, self._base, self._at = b"", start, 0

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._base + self._at

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        at = self._at
        if at + count > len(self._block):
            self._load(count)
            at = 0
        self._at = at + count
        return self._block[at : at + count]

    def _load(self, count: int) -> None:
        self._base, self._at = self.position, 0
        if self._base + count > self._stop:
            raise Refused(f"ends {self._base + count - self._stop} bytes early: the file is cut short or damaged")
        self._block = self._data.read(self._base, min(max(count, self.BLOCK), self._stop - self._base))

    def line(self) -> str:
        """The next line, without its end."""
        taken = bytearray()
        while (byte := self.take(1)) != b"\n":
            taken += byte
            if len(taken) > MAX_LINE_BYTES:
                raise Refused(f"holds a name of more than {MAX_LINE_BYTES} bytes")
        return _text(bytes(taken))


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("holds a string that is not UTF-8") from None


def _python2_string(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


class _Machine:
    """Runs one pickle. Each opcode is a method; the table at the end of the file maps bytes to them."""

    def __init__(self, cursor: Cursor):
        self.cursor = cursor
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.call_cost = 0
        self.storages: dict[str, StorageRef] = {}

    def run(self) -> Any:
        take, table = self.cursor.take, _OPCODES
        for _ in range(MAX_OPCODES):
            code = take(1)[0]
            if code == 0x2E:  # STOP
                return self.pop()
            operation = table.get(code)
            if operation is None:
                raise Refused(f"uses the opcode 0x{code:02x} ({chr(code)!r}), which no state dict needs: {RESAVE}")
            operation(self)
        raise Refused(f"runs for more than {MAX_OPCODES} opcodes")

    def pop(self) -> Any:
        if not self.stack:
            raise Refused("takes a value from an empty stack: the file is damaged")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            found = type(self.stack[-1]).__name__ if self.stack else "nothing"
            raise Refused(f"adds to a {kind.__name__} and finds {found}: the file is damaged")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise Refused("goes back to a mark that was never set: the file is damaged")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise Refused(f"nests more than {MAX_MARKS} deep")
        self.marks.append(self.stack)
        self.stack = []

    def push_marked(self, kind: type) -> None:
        items = self.pop_mark()
        self.stack.append(kind(items))

    def push_number(self, form: str, size: int) -> None:
        self.stack.append(struct.unpack(form, self.cursor.take(size))[0])

    def length(self, size: int, limit: int) -> int:
        count = int.from_bytes(self.cursor.take(size), "little")
        if count > limit:
            raise Refused(f"holds a value of {count} bytes, more than the {limit} that are read")
        return count

    def push_text(self, size: int) -> None:
        self.stack.append(_text(self.cursor.take(self.length(size, MAX_STRING_BYTES))))

    def push_bytes(self, size: int) -> None:
        self.stack.append(self.cursor.take(self.length(size, MAX_STRING_BYTES)))

    def push_python2(self, size: int) -> None:
        self.stack.append(_python2_string(self.cursor.take(self.length(size, MAX_STRING_BYTES))))

    def push_long(self, size: int) -> None:
        raw = self.cursor.take(self.length(size, MAX_INTEGER_BYTES))
        self.stack.append(int.from_bytes(raw, "little", signed=True))

    def push_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise Refused("takes a value from an empty stack: the file is damaged")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def put(self, index: int) -> None:
        if not self.stack:
            raise Refused("remembers a value of an empty stack: the file is damaged")
        self.memo[index] = self.stack[-1]
        if len(self.memo) > MAX_MEMO:
            raise Refused(f"remembers more than {MAX_MEMO} values")

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise Refused(f"recalls value {index}, which was never remembered: the file is damaged")
        self.stack.append(self.memo[index])

    def name(self) -> None:
        self.stack.append(Global(self.cursor.line(), self.cursor.line()))

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)) or len(name) + len(module) > MAX_LINE_BYTES:
            raise Refused("names something by values that are no short strings")
        self.stack.append(Global(module, name))

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise Refused("sets a key without a value: the file is damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[dict_key(key)] = value

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self, kind: type) -> None:
        items = self.pop_mark()
        self.top(kind).extend(items)

    def reduce(self) -> None:
        args, function = self.pop(), self.pop()
        self.call_cost += 4 + call_cost(args)
        if self.call_cost > MAX_CALL_COST:
            raise Refused("makes more calls, or larger ones, than any state dict needs")
        self.stack.append(call(function, args))

    def build(self) -> None:
        state, target = self.pop(), self.pop()
        self.stack.append(build(target, state))

    def persistent(self) -> None:
        storage = persistent(self.pop())
        self.stack.append(storage)
        self.storages.setdefault(storage.key, storage)

    def discard(self) -> None:
        self.pop_mark() if not self.stack else self.pop()

    def byte(self, size: int) -> int:
        return int.from_bytes(self.cursor.take(size), "little")


_OPCODES: Mapping[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.cursor.take(1),  # PROTO
    0x95: lambda m: m.cursor.take(8),  # FRAME
    ord("("): _Machine.mark,
    ord("0"): _Machine.discard,  # POP
    ord("1"): _Machine.pop_mark,  # POP_MARK
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.push_number("<i", 4),
    ord("K"): lambda m: m.push_number("<B", 1),
    ord("M"): lambda m: m.push_number("<H", 2),
    ord("G"): lambda m: m.push_number(">d", 8),
    0x8A: lambda m: m.push_long(1),
    0x8B: lambda m: m.push_long(4),
    ord("X"): lambda m: m.push_text(4),
    0x8C: lambda m: m.push_text(1),
    0x8D: lambda m: m.push_text(8),
    ord("B"): lambda m: m.push_bytes(4),
    ord("C"): lambda m: m.push_bytes(1),
    0x8E: lambda m: m.push_bytes(8),
    ord("T"): lambda m: m.push_python2(4),
    ord("U"): lambda m: m.push_python2(1),
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.push_marked(tuple),
    0x85: lambda m: m.push_tuple(1),
    0x86: lambda m: m.push_tuple(2),
    0x87: lambda m: m.push_tuple(3),
    ord("]"): lambda m: m.stack.append([]),
    ord("l"): lambda m: m.push_marked(list),
    ord("a"): _Machine.append,
    ord("e"): lambda m: m.extend(list),
    ord("}"): lambda m: m.stack.append({}),
    ord("d"): _Machine.make_dict,
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    0x8F: lambda m: m.stack.append(PickledSet()),
    0x90: lambda m: m.extend(PickledSet),
    0x91: lambda m: m.push_marked(PickledSet),
    ord("q"): lambda m: m.put(m.byte(1)),
    ord("r"): lambda m: m.put(m.byte(4)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.byte(1)),
    ord("j"): lambda m: m.get(m.byte(4)),
    ord("c"): _Machine.name,
    0x93: _Machine.stack_name,
    ord("R"): _Machine.reduce,
    0x81: _Machine.reduce,  # NEWOBJ: the same table of calls
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}


@dataclass(frozen=True, kw_only=True)
class Unpickled:
    """What a pickle holds, where it ended in the file, and every storage that it mentioned, as first mentioned."""

    value: Any
    end: int
    storages: Mapping[str, StorageRef]


def unpickle(data: FileBytes, start: int, stop: int, where: str) -> Unpickled:
    """Interprets one pickle that begins at byte `start` of the file and ends before `stop`.

    Returns:
        Its value is made of dicts, lists, tuples, scalars and the classes of `pickle_calls`; parts may be shared
        and may contain themselves.

    Raises:
        InputError: the pickle is damaged, too large, or asks for anything but tensor rebuilding.
    """
    cursor = Cursor(data, start, min(stop, start + MAX_PICKLE_BYTES))
    machine = _Machine(cursor)
    try:
        return Unpickled(value=machine.run(), end=cursor.position, storages=machine.storages)
    except Refused as problem:
        raise InputError(f"{where}: pickle, byte {cursor.position}: {problem}") from None
