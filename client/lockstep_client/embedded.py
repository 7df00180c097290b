"""A server of the client's own: a process that this one starts, and that ends with it.

The invariant: the server ends when its starter is gone, also by SIGKILL. It reads its stdin, whose other end this
process holds, and ends when that is closed (its setting `stop_with_stdin`). It listens on a unix socket of mode 0600,
and needs neither TLS nor tokens.

Not responsible for: the engine's settings, which the server checks.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import grpc

from lockstep_client.calls import HEALTH_PATH, HEALTH_SERVING
from lockstep_client.errors import EmbeddedServerError, EngineNotInstalled

DISTRIBUTION = "lockstep-engine"
STOP_TIMEOUT_S = 15.0
LONGEST_SOCKET_PATH = 100
"""Below the kernel's limit of 107 bytes."""
_POLL_S = 0.1
_LOG_TAIL = 4000

_DEFAULTS: Mapping[str, str] = {
    # The environment or a file may have settings of another server.
    "tls_cert": "",
    "tls_key": "",
    "tls_client_ca": "",
    "auth_token_file": "",
    "tenant_file": "",
    "audit_log": "",
    "health_listen": "",
    "metrics_listen": "",
    "http": "",
    "log_level": "warning",
}
_HOW_TO_INSTALL = f"""\
there is no engine in this environment ({sys.prefix}) and no `lockstep` of {DISTRIBUTION} on the PATH. The engine brings
torch, so give it an environment of its own, whose command is found on the PATH:
    pipx install '{DISTRIBUTION}[engine,llguidance]'
or install it here:
    {sys.executable} -m pip install '{DISTRIBUTION}[engine,llguidance]'
or start a server elsewhere and connect to it: Client("host:50051")"""


Setting = str | float | bool | Sequence[str]
"""A value of a setting of `lockstep serve`."""


class EmbeddedServer:
    """A server process, started once. `close` may be called at any time, from another thread than `start`, too."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        command: Sequence[str] | None,
        start_timeout_s: float,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Args: see below.

        settings: of `lockstep serve`, by name; they beat the environment.
        command: the `lockstep` command; None: found.
        start_timeout_s: longest time until the server serves.
        show: called during the start with the last line of its log, which says how far the start is.
        """
        for name in ("listen", "stop_with_stdin"):
            if name in settings:
                raise ValueError(f"{name}: an embedded server sets it itself")
        self.address = f"unix:{_socket_path()}"
        self._argv = [*(command or find_engine()), "serve", *_flags(self.address, settings)]
        self._start_timeout_s = start_timeout_s
        self._show = show
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server and wait until it serves. Raises EmbeddedServerError with the end of its log."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # Control-C in a terminal is for the client; the server then ends with it.
                start_new_session=True,
            )
            self._await_serving(self._process)
        except OSError as error:
            self.close()
            raise EmbeddedServerError(f"cannot start {self._argv[0]}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server: close its stdin, wait for it to drain, and kill it if it does not end."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _await_serving(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        with grpc.insecure_channel(self.address) as channel:
            check = channel.unary_unary(HEALTH_PATH, lambda empty: empty, lambda response: response)
            while time.monotonic() < deadline_s:
                if process.poll() is not None:
                    raise EmbeddedServerError(f"the server ended with status {process.returncode}\n{self._tail()}")
                if _serves(check):
                    return
                if log := self._end_of_log().splitlines():
                    self._show(log[-1])
                time.sleep(_POLL_S)
        raise EmbeddedServerError(f"the server did not serve within {self._start_timeout_s:g} s\n{self._tail()}")

    def _tail(self) -> str:
        return f"{' '.join(self._argv)}\n{self._end_of_log()}"

    def _end_of_log(self) -> str:
        if self._log is None:
            return "it was closed while it started"
        # The server writes at the position of its own copy, which moves with this one: `pread` moves neither.
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _LOG_TAIL)
        return os.pread(descriptor, _LOG_TAIL, start).decode(errors="replace")

    def __repr__(self) -> str:
        return f"<EmbeddedServer {self.address} pid={self.pid}>"


def find_engine(
    find_spec: Callable[[str], object | None] = importlib.util.find_spec,
    which: Callable[[str], str | None] = shutil.which,
) -> list[str]:
    """Return the command of the engine in this environment, else of the one on the PATH. Raises EngineNotInstalled."""
    if find_spec("gpu_engine") is not None:
        return [sys.executable, "-m", "gpu_engine"]
    found = which("lockstep")
    if found is not None and _is_ours(found):
        return [found]
    raise EngineNotInstalled(_HOW_TO_INSTALL)


def _is_ours(command: str) -> bool:
    # Another project on PyPI is called lockstep.
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.startswith(DISTRIBUTION)


def _serves(check: Callable[..., bytes]) -> bool:
    try:
        return check(b"", timeout=2) == HEALTH_SERVING
    except grpc.RpcError:
        return False


def _flags(address: str, settings: Mapping[str, Setting]) -> list[str]:
    flags = []
    for name, value in {**_DEFAULTS, **settings, "listen": address, "stop_with_stdin": True}.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            flags.append(_flag(name, str(value).lower() if isinstance(value, bool) else str(value)))
        else:  # the flag of a list gives one value, so its name is in the singular
            flags.extend(_flag(name.removesuffix("s"), each) for each in value)
    return flags


def _flag(name: str, text: str) -> str:
    return f"--{name.replace('_', '-')}={text}"


def _socket_path() -> str:
    name = f"lockstep-{secrets.token_hex(8)}.sock"
    path = os.path.join(tempfile.gettempdir(), name)
    return path if len(path.encode()) <= LONGEST_SOCKET_PATH else f"/tmp/{name}"
