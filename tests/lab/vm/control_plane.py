"""The control plane of a scenario's cluster: processes of this machine, on the guests' wire."""

import contextlib
import os
import pathlib
import signal
import subprocess

from .guest import Guest, die_with_runner

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "control-plane"
# Those of a cluster's programs that run in the guests.
OF_NODES = ("kubelet", "kubectl", "multus-daemon", "multus-shim", "helm")
# The NIC that the first guest's QEMU opens for it.
NIC = "control-plane"


def namespace() -> list[str]:
    """Before a command: lets it run in a network namespace of its own, where NIC can be made."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # A user namespace takes from the command that it dies with the runner.
    return ["unshare", "--net", *user, "--", "setpriv", "--pdeathsig", "KILL", "--"]


class ControlPlane:
    """The script `control-plane`, which runs until it is ended."""

    def __init__(self, first: Guest, programs: str, directory: pathlib.Path, guests: int) -> None:
        self.directory = directory / "control-plane"
        self.directory.mkdir(exist_ok=True)
        enter = ["nsenter", "--target", str(first.process.pid), "--net"]
        if os.geteuid():
            enter += ["--user", "--preserve-credentials"]
        nodes = [f"node{number}" for number in range(1, guests + 1)]
        script = [SCRIPT, os.path.abspath(programs), self.directory, directory / "share", *nodes]
        self.log = self.directory / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*enter, "--", "setpriv", "--pdeathsig", "KILL", "--", *script],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_runner,
            )

    def ask(self, line: str) -> None:
        """A command, and the name of the file that takes the answer."""
        with contextlib.suppress(BrokenPipeError):  # it ended, which alive() tells
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def alive(self) -> bool:
        """Whether it takes commands, or will."""
        return self.process.poll() is None

    def end(self) -> None:
        """Ends it; its programs die with it."""
        if self.alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
