"""Programs without the job's secret that try to reach its store; ``python strangers.py KIND ADDRESS PORT [COUNT]``.

It prints what it got, or for the kind "all", which draws COUNT of them, a list of kinds and answers as JSON. It imports
nothing but the standard library, so that it starts in a moment.

    garbage     random bytes, read until the end
    silent      connects and says nothing
    half_open   says half of the greeting
    guess       a whole proof with another secret
    replay      the bytes of a rank's proof that was recorded
    torch       what torch's own client says first, and then keys that it would delete
    huge        a value of 1 GiB
"""

import hashlib
import hmac
import json
import os
import random
import secrets
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

KINDS = ("garbage", "silent", "half_open", "guess", "replay", "torch", "huge")
_GREETING = b"SHARDW01"
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
"""What torch's client of this year sends first: the query of validation and its magic number."""
_DELETE = struct.pack("=BQ", 8, 1) + b"k"
_SILENCE_S = float(os.environ.get("SILENCE_S", "8"))


def visit(kind: str, address: str, port: int, recorded: bytes = b"") -> str:
    """Try once, and return what was answered: "nothing", "closed", "refused" or "accepted"."""
    try:
        with socket.create_connection((address, port), timeout=_SILENCE_S) as opened:
            return _spoken(kind, opened, recorded)
    except TimeoutError:
        return "nothing"
    except (ConnectionError, BrokenPipeError):
        return "closed"


def _spoken(kind: str, opened: socket.socket, recorded: bytes) -> str:
    if kind == "garbage":
        opened.sendall(random.randbytes(random.randrange(1, 4096)))
    elif kind == "half_open":
        opened.sendall(_GREETING[: random.randrange(1, 8)])
    elif kind == "torch":
        opened.sendall(_VALIDATE + _DELETE)
    elif kind == "huge":
        opened.sendall(struct.pack("=BQ", 0, 1) + b"k" + struct.pack("=Q", 1 << 30))
        for _ in range(1 << 10):
            opened.sendall(bytes(1 << 20))
    elif kind in ("guess", "replay"):
        own = recorded[8:40] if kind == "replay" else secrets.token_bytes(32)
        opened.sendall(_GREETING + own)
        other = opened.recv(32)
        proof = hmac.new(b"password", b"shardwise rank" + own + other, hashlib.sha256).digest()
        opened.sendall(recorded[40:] if kind == "replay" else proof)
        answer = opened.recv(33)
        return "accepted" if answer[:1] == b"\x01" else "refused" if answer else "closed"
    return "accepted" if opened.recv(1) else "closed"


def crowd(address: str, port: int, count: int, recorded: bytes) -> list[tuple[str, str]]:
    """Try ``count`` times, fifty at once, with drawn kinds, and return kinds and answers."""
    draws = random.Random(port)
    kinds = [draws.choice(KINDS) for _ in range(count)]
    with ThreadPoolExecutor(50) as pool:
        return list(
            zip(kinds, pool.map(lambda kind: visit(kind, address, port, recorded), kinds), strict=True)
        )


if __name__ == "__main__":
    said = bytes.fromhex(os.environ.get("RECORDED", ""))
    kind, where = sys.argv[1], (sys.argv[2], int(sys.argv[3]))
    print(json.dumps(crowd(*where, int(sys.argv[4]), said)) if kind == "all" else visit(kind, *where, said))
