"""Where the members of a zip archive lie, for archives whose members are stored as they are (as PyTorch writes them).

Every record is held against the file: members must not overlap, repeat, be compressed, or reach past the directory.
"""

import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardzoo.convert.file_bytes import FileBytes
from shardzoo.convert.names import name_problem
from shardzoo.errors import InputError, fail_if

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")  # one member in the central directory
_LOCAL = struct.Struct("<4s5H3L2H")  # the header in front of a member's bytes
_MAX_COMMENT = 65535
_MAX_DIRECTORY = 256 << 20
MAX_MEMBERS = 1_000_000
_ABSENT32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One stored member: `offset` and `size` of its bytes, and the CRC-32 that the archive states."""

    name: str
    offset: int
    size: int
    crc: int
    header_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def read_members(data: FileBytes, check_names: Callable[[list[str]], None]) -> dict[str, Member]:
    """All members of the archive by name; `check_names` sees the names first and may refuse the archive for them.

    Raises:
        InputError: the archive is cut short, damaged, or not of stored members; every bad member is named.
    """
    start, size, count = _directory(data)
    members: dict[str, Member] = {}
    problems: list[str] = []
    entries = list(_entries(data, start, size, count))
    check_names([name for name, _ in entries])
    for name, fields in entries:
        member = _member(data, name, fields, start, problems)
        if name in members:
            problems.append(f"{name}: is in the archive twice")
        elif member is not None:
            members[name] = member
        if len(problems) >= 20:
            break
    problems += _overlaps(members)
    fail_if(problems, f"{data.path}: not a sound archive of weights")
    return members


def has_checksums(members: dict[str, Member]) -> bool:
    """Whether the archive states CRC-32s at all: `torch.serialization.set_crc32_options(False)` writes zeros."""
    return any(member.crc for member in members.values())


def check_crc(data: FileBytes, member: Member, block: int = 8 << 20) -> None:
    """Reads a member through and holds it against its CRC-32.

    Raises:
        InputError: they differ.
    """
    crc = 0
    for offset in range(member.offset, member.end, block):
        count = min(block, member.end - offset)
        crc = zlib.crc32(data.view(offset, count), crc)
        data.release(offset, count)
    if crc != member.crc:
        raise InputError(
            f"{data.path}: member {member.name}: CRC-32 is {crc:08x}, the archive states {member.crc:08x}:"
            " the bytes are damaged, fetch the file again"
        )


def _damaged(data: FileBytes, what: str) -> InputError:
    return InputError(f"{data.path}: size={data.size}: {what}: the archive is cut short or damaged, fetch it again")


def _directory(data: FileBytes) -> tuple[int, int, int]:
    """Offset, size and member count of the central directory."""
    tail_start = max(0, data.size - _END.size - _MAX_COMMENT)
    tail = data.read(tail_start, data.size - tail_start)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise _damaged(data, "no end-of-directory record is in the last 64 KiB")
    _, disk, first_disk, here, count, size, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        raise _damaged(data, "the end-of-directory record does not end the file")
    position = tail_start + at
    # PyTorch writes the 64-bit records into every archive, whether the short one has room or not.
    locator = data.read(max(0, position - _LOCATOR64.size), 4) == b"PK\x06\x07"
    if locator or _ABSENT32 in (size, start) or 0xFFFF in (here, count):
        position, disk, first_disk, here, count, size, start = _directory64(data, position)
    if disk or first_disk or here != count:
        raise _damaged(data, "the archive is one of several volumes")
    if start + size != position or size > _MAX_DIRECTORY or count > MAX_MEMBERS or count * _ENTRY.size > size:
        raise _damaged(
            data, f"a directory of {count} members in bytes {start} to {start + size} is not before {position}"
        )
    return start, size, count


def _directory64(data: FileBytes, end: int) -> tuple[int, ...]:
    at = end - _LOCATOR64.size
    if at < 0:
        raise _damaged(data, "the locator of the 64-bit directory record is missing")
    magic, _, position, _ = _LOCATOR64.unpack(data.read(at, _LOCATOR64.size))
    if magic != b"PK\x06\x07" or position + _END64.size > at:
        raise _damaged(data, "the locator of the 64-bit directory record is missing or points outside")
    magic, _, _, _, disk, first_disk, here, count, size, start = _END64.unpack(data.read(position, _END64.size))
    if magic != b"PK\x06\x06":
        raise _damaged(data, "the 64-bit directory record is missing")
    return position, disk, first_disk, here, count, size, start


def _entries(data: FileBytes, start: int, size: int, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, (flags, method, crc, stored size, size, header offset)) of each entry of the directory."""
    directory, at = data.read(start, size), 0
    for _ in range(count):
        if at + _ENTRY.size > size:
            raise _damaged(data, "the directory ends within a member's entry")
        fields = _ENTRY.unpack_from(directory, at)
        if fields[0] != b"PK\x01\x02":
            raise _damaged(data, "the directory holds something that is no entry")
        flags, method, crc, stored, plain = fields[3], fields[4], fields[7], fields[8], fields[9]
        name_size, extra_size, comment_size, offset = fields[10], fields[11], fields[12], fields[16]
        name_at = at + _ENTRY.size
        at = name_at + name_size + extra_size + comment_size
        if at > size:
            raise _damaged(data, "the directory ends within a member's entry")
        name = _name(data, directory[name_at : name_at + name_size])
        extra = directory[name_at + name_size : name_at + name_size + extra_size]
        plain, stored, offset = _wide(data, name, extra, [plain, stored, offset])
        yield name, (flags, method, crc, stored, plain, offset)
    if at != size:
        raise _damaged(data, f"the directory holds {size - at} bytes that belong to no member")


def _name(data: FileBytes, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _damaged(data, f"a member's name is not UTF-8 ({raw[:40]!r})") from None
    if problem := name_problem(name):
        raise _damaged(data, problem)
    return name


def _wide(data: FileBytes, name: str, extra: bytes, values: list[int]) -> list[int]:
    """Replaces the 32-bit fields that are marked absent by those of the 64-bit extra field, in its fixed order."""
    if _ABSENT32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + size]
        at += 4 + size
        if kind == 1:
            wide = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            values = [next(wide, _ABSENT32) if value == _ABSENT32 else value for value in values]
    return values


def _member(data: FileBytes, name: str, fields: tuple[int, ...], limit: int, problems: list[str]) -> Member | None:
    flags, method, crc, stored, plain, header = fields
    if flags & 1:
        problems.append(f"{name}: is encrypted")
    elif method != 0 or stored != plain:
        problems.append(
            f"{name}: is compressed (method {method}, {stored} of {plain} bytes): PyTorch stores it as it is"
        )
    elif header + _LOCAL.size > limit:
        problems.append(f"{name}: begins at byte {header}, after the members end ({limit})")
    else:
        return _located(data, name, crc, plain, header, limit, problems)
    return None


def _located(
    data: FileBytes, name: str, crc: int, size: int, header: int, limit: int, problems: list[str]
) -> Member | None:
    encoded = name.encode()
    raw = data.read(header, min(_LOCAL.size + len(encoded), limit - header))
    magic, *_, name_size, extra_size = _LOCAL.unpack_from(raw)
    offset = header + _LOCAL.size + name_size + extra_size
    if magic != b"PK\x03\x04":
        problems.append(f"{name}: no member begins at byte {header}, where the directory says so")
    elif name_size != len(encoded) or raw[_LOCAL.size :] != encoded:
        problems.append(f"{name}: has another name in front of its bytes")
    elif offset + size > limit:
        problems.append(f"{name}: {size} bytes from byte {offset} reach past the members' end ({limit})")
    else:
        return Member(name=name, offset=offset, size=size, crc=crc, header_offset=header)
    return None


def _overlaps(members: dict[str, Member]) -> list[str]:
    ordered = sorted(members.values(), key=lambda member: (member.header_offset, member.offset))
    return [
        f"{after.name}: begins at byte {after.header_offset}, within {before.name} (to byte {before.end})"
        for before, after in itertools.pairwise(ordered)
        if after.header_offset < before.end
    ][:20]
