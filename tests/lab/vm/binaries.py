"""The programs that guests run: the product's, which are under test, and the stand-ins."""

import os
import pathlib
import subprocess
import threading

from .architecture import Architecture, of_program

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
PROFILE = "quick"


class CannotStart(Exception):
    """Something a scenario needs is not here; the message says what to do."""


class Binaries:
    """Where binaries come from. The product's are found, never built: what is tested is what
    somebody chose. The stand-ins are the test crate's own: those that lie beside the product's, others
    are built when first asked for."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.place = pathlib.Path(os.environ.get("RDMA_BIN_DIR", ROOT / "dist")).resolve()
        self.target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
        self.lock = threading.Lock()
        self.built: set[str] = set()

    def product(self, name: str) -> pathlib.Path:
        """A binary under test."""
        path = self.place / name
        if not path.is_file():
            raise CannotStart(f"no {name} in {self.place}: run `make build`, or name its folder in RDMA_BIN_DIR")
        if (built_for := of_program(path)) != self.architecture.name:
            raise CannotStart(
                f"{path} is for {built_for or 'an unknown architecture'}, these guests are {self.architecture.name}: "
                f"name a folder of such programs in RDMA_BIN_DIR (make build TARGET={self.architecture.target})"
            )
        return path

    def standin(self, name: str) -> pathlib.Path:
        """A program of the test crate, static so that a guest can run it."""
        if (self.place / name).is_file():
            return self.place / name
        with self.lock:
            if name not in self.built:
                command = ["cargo", "build", "--locked", "--quiet", "--profile", PROFILE]
                command += ["--target", self.architecture.target]
                command += ["--package", "e2e", "--no-default-features", "--bin", name]
                built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                if built.returncode:
                    raise CannotStart(f"{name} cannot be built: {built.stderr.strip()[-1000:]}")
                self.built.add(name)
        return self.target / self.architecture.target / PROFILE / name
