"""What else may connect to the first process's port while the others come: it is no process and stops none."""

import contextlib
import socket
import struct
import threading
import time

import pytest
from processes import free_port

from shardzoo.checkpoints import distributed


@contextlib.contextmanager
def gathering(processes, timeout):
    """Process 0 waiting for the others in a thread: its port, and what it raised once the block has ended."""
    port, raised = free_port(), []

    def wait():
        try:
            distributed._gather(port, processes, timeout)
        except distributed.ProcessTimeout as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    yield port, raised
    thread.join()


def connect(port, said=b""):
    """A connection that says something and then nothing more."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(said)
            return connection
        time.sleep(0.05)
    raise AssertionError(f"nobody listens on {port}")


def reset(connection):
    """Breaks a connection off, as the kernel does for a process that is killed with data unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"2\n", b"0\n", b"-1\n", b"\xff\xfe\n"])
def test_a_stray_connection_neither_holds_up_the_start_nor_counts(said):
    with gathering(2, timeout=60.0) as (port, raised):
        stray = connect(port, said)
        begin = time.monotonic()
        distributed._report("127.0.0.1", port, 1, 60.0)
        assert time.monotonic() - begin < 20
        stray.close()
    assert raised == []


def test_connections_that_break_off_do_not_end_the_first_process():
    with gathering(3, timeout=60.0) as (port, raised):
        reset(connect(port))
        reset(connect(port, b"1\n"))
        process = connect(port, b"1\n")
        time.sleep(0.5)  # until its line has been read
        reset(process)
        distributed._report("127.0.0.1", port, 2, 60.0)
    assert raised == []
