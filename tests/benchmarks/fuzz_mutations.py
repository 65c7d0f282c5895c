"""Damaged and odd inputs made from valid ones, by a generator: plain bytes, text, JSON and the files of the readers."""

import copy
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutation = Callable[[Random, bytes], bytes]

BYTES = (b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0" * 64, b"A" * 300)
TOKENS = (
    *("", "0", "-1", "1e999", "-1e308", "NaN", "Infinity", "9" * 40, "0x10", "1,5", "1e-320", "true", "null", "None"),
    *("../../x", "/etc/hostname", "\0", "\ufeff", "ä" * 50, "<", "&amp;", "&x;", '"', "\n\n", "x" * 5000, "[]", "{}"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.5, 1e308, -1e308, 1e-320, "", "x", "../x"),
    *([], {}, [None], [[[]]], {"": ""}, {"a": {"b": {}}}, "x" * 5000, "\0", [1] * 2000, "nan", "Infinity"),
)
NUMBERS = (0, 1, 2, 3, 5, 7, 255, 256, -1, 32767, -32768, 16, 64, 512, 768, 1024, 1280, 2**31 - 1, -(2**31))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-38, 1e-45, 3e38, -3e38, float("nan"), float("inf"), float("-inf"), 0.3, 348.0, 1e9)
TAGS = (256, 257, 258, 259, 262, 273, 277, 279, 284, 322, 34675)  # of TIFF: sizes, bits, compression, strips, tiles
# byte offset and type of the fields of a NIfTI-1 header: nifti1.h
NIFTI = (
    (0, "i"), (40, "8h"), (56, "3f"), (68, "h"), (70, "h"), (72, "h"), (74, "h"), (76, "8f"), (108, "f"), (112, "f"),
    (116, "f"), (120, "h"), (122, "b"), (123, "b"), (124, "2f"), (252, "h"), (254, "h"), (256, "6f"), (280, "12f"),
    (344, "4s"),
)  # fmt: skip


def of_bytes(random: Random, content: bytes) -> bytes:
    """Flip, overwrite, insert, cut, double or move some bytes."""
    held = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        start = random.randrange(len(held) + 1)
        end = min(len(held), start + random.choice((1, 2, 4, 8, 64, 1000)))
        kind = random.randrange(6)
        if kind == 0 and start < len(held):
            held[start] ^= 1 << random.randrange(8)
        elif kind == 1:
            held[start:end] = random.choice(BYTES)
        elif kind == 2:
            held[start:start] = random.randbytes(random.choice((1, 4, 100)))
        elif kind == 3:
            del held[start:end]
        elif kind == 4:
            held[start:start] = held[start:end] * random.choice((1, 2, 50))
        else:
            del held[start:]
    return bytes(held)


def of_text(random: Random, content: bytes) -> bytes:
    """Replace, drop or double words, numbers and marks; sometimes bytes instead."""
    if random.random() < 0.2:
        return of_bytes(random, content)
    parts = re.findall(r"\w+|\s+|.", content.decode("utf-8", errors="replace"), re.DOTALL)
    for _ in range(random.choice((1, 1, 2, 5))):
        place, kind = random.randrange(len(parts) + 1), random.randrange(5)
        end = place + random.choice((1, 1, 3, 30))
        if kind < 2:
            parts[place : place + 1] = [random.choice(TOKENS)]
        elif kind == 2:
            del parts[place:end]
        elif kind == 3:
            parts[place:place] = parts[place:end] * random.choice((1, 2, 100))
        else:
            other = random.randrange(len(parts) + 1)
            parts[place:place] = parts[other : other + 20]
    return "".join(parts).encode("utf-8", errors="replace")


def of_json(random: Random, content: bytes) -> bytes:
    """Replace, drop, rename or add values anywhere in the tree; sometimes text instead."""
    if random.random() < 0.3:
        return of_text(random, content)
    tree = json.loads(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        _change_tree(random, tree)
    if random.random() < 0.02:
        depth = random.choice((90, 500, 990, 3000, 100_000))
        return random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth, b'{"seed": ' + b"9" * 5000 + b"}"))
    return json.dumps(tree).encode()


def _change_tree(random: Random, tree: Any) -> None:
    node = random.choice(_containers(tree))
    kind = random.randrange(4)
    if isinstance(node, list):
        place = random.randrange(len(node) + 1)
        node[place : place + (kind > 0)] = [] if kind == 1 else [copy.deepcopy(random.choice(VALUES))]
        return
    key = random.choice([*node, ""]) if node else ""
    if kind == 0:
        node.pop(key, None)
    elif kind == 1:
        node[random.choice((*TOKENS, key + "x", key.upper()))] = copy.deepcopy(node.get(key))
    elif kind == 2 and node:
        node[key] = copy.deepcopy(node[random.choice(list(node))])
    else:
        node[key] = copy.deepcopy(random.choice(VALUES))


def _containers(tree: Any) -> list[Any]:
    found, waiting = [], [tree]
    while waiting and len(found) < 2000:
        node = waiting.pop()
        if isinstance(node, dict | list):
            found.append(node)
            waiting += list(node.values()) if isinstance(node, dict) else node
    return found or [{}]


def of_nifti(random: Random, content: bytes) -> bytes:
    """Other numbers in the header's fields; sometimes bytes anywhere."""
    if random.random() < 0.25 or len(content) < 348:
        return of_bytes(random, content)
    held = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        offset, kind = random.choice(NIFTI)
        count, letter = int(kind[:-1] or 1), kind[-1]
        if letter == "s":
            held[offset : offset + count] = random.choice((b"n+1\0", b"ni1\0", b"n+2\0", b"\0" * 4))
            continue
        size = struct.calcsize(letter)
        place = offset + size * random.randrange(count)
        if letter == "f":
            struct.pack_into("<f", held, place, random.choice(FLOATS))
        else:
            limit = 2 ** (8 * size - 1)
            struct.pack_into(f"<{letter}", held, place, max(-limit, min(limit - 1, random.choice(NUMBERS))))
    return bytes(held)


def of_gzip(random: Random, content: bytes) -> bytes:
    """What is inside is changed and packed anew, or the stream itself is damaged."""
    if random.random() < 0.3:
        return of_bytes(random, content)
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(of_nifti(random, zlib.decompress(content, 31))) + packer.flush()


def of_png(random: Random, content: bytes) -> bytes:
    """Chunks with other content and a right checksum, pixels that do not fit; sometimes bytes anywhere."""
    if random.random() < 0.3:
        return of_bytes(random, content)
    chunks, place = [], 8
    while place + 8 <= len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        chunks.append([content[place + 4 : place + 8], content[place + 8 : place + 8 + length]])
        place += 12 + length
    for _ in range(random.choice((1, 1, 2))):
        number, kind = random.randrange(len(chunks)), random.randrange(6)
        name, data = chunks[number]
        if kind == 0 and name == b"IDAT":
            chunks[number][1] = zlib.compress(of_bytes(random, zlib.decompress(data)))
        elif kind == 1 and name == b"IHDR":
            chunks[number][1] = _other_header(random, data)
        elif kind == 2:
            chunks.insert(random.randrange(len(chunks) + 1), list(chunks[number]))
        elif kind == 3 and len(chunks) > 1:
            del chunks[number]
        elif kind == 4:
            chunks[number][0] = random.choice((b"tRNS", b"PLTE", b"gAMA", b"acTL", b"fcTL", b"eXIf", b"iCCP", b"zTXt"))
        else:
            chunks[number][1] = of_bytes(random, data)
    packed = [
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in chunks
    ]
    return content[:8] + b"".join(packed)


def _other_header(random: Random, data: bytes) -> bytes:
    width, height, *rest = struct.unpack(">IIBBBBB", data.ljust(13, b"\0")[:13])
    sizes = (0, 1, width, height, 3000, 65535, 2**31 - 1, 2**32 - 1)
    rest = [random.choice((value, value, 0, 1, 2, 3, 4, 6, 8, 16)) for value in rest]
    return struct.pack(">IIBBBBB", random.choice(sizes), random.choice(sizes), *rest)


def of_tiff(random: Random, content: bytes) -> bytes:
    """Other types, counts and values in the first directory; sometimes bytes anywhere."""
    if random.random() < 0.3 or content[:4] != b"II*\0":
        return of_bytes(random, content)
    held = bytearray(content)
    (start,) = struct.unpack_from("<I", held, 4)
    (entries,) = struct.unpack_from("<H", held, start)
    for _ in range(random.choice((1, 1, 2, 4))):
        place = start + 2 + 12 * random.randrange(entries)
        kind = random.randrange(4)
        number = random.choice(NUMBERS) & 0xFFFFFFFF
        if kind == 0:
            struct.pack_into(
                "<H", held, place, random.choice((256, 257, 258, 259, 262, 273, 277, 279, 284, 322, 34675))
            )
        elif kind == 1:
            struct.pack_into("<H", held, place + 2, random.randrange(20))
        else:
            struct.pack_into("<I", held, place + (4 if kind == 2 else 8), number)
    return bytes(held)


def of_zip(random: Random, content: bytes) -> bytes:
    """A member with other bytes and a right checksum, or without it; sometimes bytes anywhere."""
    if random.random() < 0.2:
        return of_bytes(random, content)
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        members = [(name, file.read(name)) for name in file.namelist()]
    number = random.choice([0, random.randrange(len(members))])  # the first is the pickle, which names all others
    name, data = members[number]
    kind = random.randrange(5)
    if kind == 0 and len(members) > 1:
        del members[number]
    elif kind == 1:
        members[number] = (name, random.choice(members)[1])
    else:
        members[number] = (name, of_bytes(random, data))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as file:
        for name, data in members:
            file.writestr(name, data)
    return packed.getvalue()


def one_of(seeds: Sequence[tuple[str, bytes]], mutations: dict[str, Mutation], random: Random) -> tuple[str, bytes]:
    """A seed's ending and its mutated content; now and then the seed as it is, which must be taken."""
    suffix, content = random.choice(seeds)
    if random.random() < 0.01:
        return suffix, content
    try:
        return suffix, mutations[suffix](random, content)
    except Exception:  # a second change of what the first has damaged
        return suffix, of_bytes(random, content)
