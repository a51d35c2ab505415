"""A running guest: the QEMU process, its monitor, and the line on which the guest reports."""

import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import time

PR_SET_PDEATHSIG = 1


class GuestDied(Exception):
    """QEMU ended, or never came up; the message says what it left behind."""


def die_with_runner() -> None:
    """For preexec_fn: the process ends when the runner does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Guest:
    """One virtual machine. QEMU connects to two sockets on which this side listens: the
    guest's second serial line, and the monitor (QMP)."""

    def __init__(self, number: int, command: list[str], directory: pathlib.Path, interactive: bool) -> None:
        self.number = number
        self.directory = directory
        self.pending = b""
        listening = [self._listen(directory / f"{role}-{number}") for role in ("control", "qmp")]
        self.log = directory / f"qemu-{number}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=None if interactive else log,
                stderr=log,
                preexec_fn=die_with_runner,
            )
        try:
            self.control, self.qmp = [self._accept(listener) for listener in listening]
            self.control.setblocking(False)
            self.monitor = self.qmp.makefile("r")
            self.monitor.readline()  # the greeting
            self._qmp("qmp_capabilities")
        except BaseException:
            self.end()
            raise
        finally:
            for listener in listening:
                listener.close()

    @staticmethod
    def _listen(path: pathlib.Path) -> socket.socket:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(0.5)
        return listener

    def _accept(self, listener: socket.socket) -> socket.socket:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None:
                    raise GuestDied(f"QEMU ended at once: {self.log.read_text().strip()[-500:]}") from None
                continue
            connection.settimeout(30)
            return connection
        raise GuestDied("QEMU does not open its sockets")

    def _qmp(self, execute: str, **arguments: str):
        self.qmp.sendall(json.dumps({"execute": execute, "arguments": arguments}).encode() + b"\n")
        while line := self.monitor.readline():
            answer = json.loads(line)
            if "error" in answer:
                return answer["error"]["desc"]
            if "return" in answer:
                return answer["return"]
        raise GuestDied("QEMU closed its monitor")

    def monitor_command(self, line: str) -> str:
        """A command of QEMU's human monitor; the answer is empty when all is well."""
        return str(self._qmp("human-monitor-command", **{"command-line": line})).replace("\r", "")

    def reset(self) -> None:
        """The machine starts anew, as by its reset button, with the devices that it has now. Asked for by
        nobody (a panic), a reset ends it."""
        self._qmp("set-action", reboot="reset")
        self._qmp("system_reset")

    def booted(self) -> None:
        """After a reset, another one ends it again."""
        self._qmp("set-action", reboot="shutdown")

    def lines(self) -> list[str]:
        """What the guest has reported since the last call. Empty lines are left out."""
        try:
            while data := self.control.recv(65536):
                self.pending += data
        except BlockingIOError:
            pass
        *whole, self.pending = self.pending.split(b"\n")
        return [text for line in whole if (text := line.decode(errors="replace").strip("\r"))]

    def alive(self) -> bool:
        """Whether QEMU runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """Ends the machine. Nothing of it is needed any more: what it keeps is in this machine's folders."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for name in ("control", "qmp"):
            if connection := getattr(self, name, None):
                connection.close()
            (self.directory / f"{name}-{self.number}").unlink(missing_ok=True)
