"""A real Mooncake Store on this machine's loopback: a master and a process that owns the memory, for tests and the demo.

The owner is a process of its own: within one process the client copies memory and never uses the transport. Both end
with `close`, and the owner also when this process ends. The wheel's client listens on all interfaces whatever it is told.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from .errors import StateIOError
from .mooncake import MooncakeConfig, client_class, wait_for_port

#: Joins the store with a segment and stays until its standard input ends.
OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


class LoopbackMooncake:
    """Starts both processes. Times of expiry are short, so that faults pass in seconds; logs go to `folder`.

    `segment_bytes`: a multiple of 16 MiB. `lease_ttl_ms`: how long a read key cannot be removed; `client_ttl_s`: how long a
    dead owner is not noticed; `put_discard_s`: how long an unfinished put holds its key.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        segment_bytes: int = 64 << 20,
        lease_ttl_ms: int = 500,
        client_ttl_s: int = 2,
        put_discard_s: int = 2,
        start_owner: bool = True,
    ) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # read when the wheel is loaded
        client_class()
        self.folder, self.segment_bytes = Path(folder), segment_bytes
        self._options = [
            f"--default_kv_lease_ttl={lease_ttl_ms}",
            f"--client_ttl={client_ttl_s}",
            f"--put_start_discard_timeout_sec={put_discard_s}",
            "--metrics_host=127.0.0.1",
            "--rpc_address=127.0.0.1",
            "--logtostderr",
        ]
        self.port, self.admin_port = free_port(), free_port()
        self.master: subprocess.Popen[bytes] | None = None
        self.owner: subprocess.Popen[bytes] | None = None
        try:
            self.start_master()
            if start_owner:
                self.start_owner()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """host:port of the master."""
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> MooncakeConfig:
        """How a client of this store is made."""
        return MooncakeConfig(self.address)

    def start_master(self) -> None:
        """Starts the master, on the same ports each time."""
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.admin_port}"]
        with (self.folder / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [str(program), *ports, *self._options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_for_port(self.address, 20.0)
        if self.master.poll() is not None:
            raise StateIOError(f"mooncake_master ended at once, see {self.folder / 'master.log'}")

    def start_owner(self) -> None:
        """Starts a process that lends `segment_bytes` of memory to the store."""
        with (self.folder / "owner.log").open("ab") as log:
            self.owner = subprocess.Popen(
                [sys.executable, "-c", OWNER, self.address, str(self.segment_bytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self.owner.stdout is not None
        answer = self.owner.stdout.readline().strip()
        if answer != b"0":
            raise StateIOError(f"the segment's owner did not start: {answer!r}, see {self.folder / 'owner.log'}")

    def kill_master(self) -> None:
        """SIGKILL. All keys are lost; clients find a restarted master by themselves."""
        _kill(self.master)

    def kill_owner(self) -> None:
        """SIGKILL. The master forgets it after the time to live of a client."""
        _kill(self.owner)

    def pause_owner(self, paused: bool) -> None:
        """SIGSTOP or SIGCONT: transfers to and from it hang in between."""
        assert self.owner is not None
        self.owner.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def list_keys(self) -> list[str]:
        """Keys that the master lists."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/get_all_keys", timeout=5) as answer:
            text = answer.read().decode()
        return list(json.loads(text)) if text.startswith("[") else text.split()

    def close(self) -> None:
        """Ends both processes."""
        for process in (self.owner, self.master):
            _kill(process)

    def __enter__(self) -> LoopbackMooncake:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_port() -> int:
    """A TCP port that nothing uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.returncode is not None:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
