"""A command on a host whose door is open (`started.py`), as if it ran here: python door_client.py ADDRESS PORT -- ARGV

The first line of stdin is the job's token. Stands alone: it is started anew for each command.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys

FRAME = struct.Struct(">cI")  # what it is, and how many bytes follow
IN, OUT, ERR, EXIT, REFUSED = b"i", b"o", b"e", b"x", b"r"  # an empty IN is the end of stdin
LARGEST = 1 << 20
LOST = 255  # of this program, as of ssh: the connection was lost


def send(channel: socket.socket, kind: bytes, data: bytes = b"") -> None:
    channel.sendall(FRAME.pack(kind, len(data)) + data)


def receive(channel: socket.socket) -> tuple[bytes, bytes]:
    """A frame, whole. Raises OSError where the connection ends first, or the frame is none of ours."""
    kind, length = FRAME.unpack(_exactly(channel, FRAME.size))
    if length > LARGEST:
        raise OSError("that is no frame")
    return kind, _exactly(channel, length)


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = channel.recv(count - len(data))
        if not more:
            raise OSError("the connection was lost")
        data += more
    return data


def _line(fd: int) -> str:
    """The first line, and no byte more."""
    text = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        text += byte
    return text.decode()


def main() -> int:
    address, port, _, *argv = sys.argv[1:]
    with socket.create_connection((address, int(port)), timeout=30) as channel:
        channel.settimeout(None)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(channel, IN, json.dumps({"token": _line(0), "argv": argv}).encode())
        sources = [0, channel.fileno()]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if 0 in ready:
                data = os.read(0, 1 << 16)
                send(channel, IN, data)
                sources = sources if data else sources[1:]
            if channel.fileno() in ready:
                kind, data = receive(channel)
                if kind == EXIT:
                    return int(data)
                if kind == REFUSED:
                    print(data.decode(), file=sys.stderr)
                    return 127
                with open(1 if kind == OUT else 2, "wb", closefd=False, buffering=0) as out:
                    while data:
                        data = data[out.write(data) or 0 :]


if __name__ == "__main__":
    try:
        code = main()
    except OSError as error:
        print(f"the host's process is gone: {error}", file=sys.stderr)
        code = LOST
    sys.exit(code if code >= 0 else 128 - code)
