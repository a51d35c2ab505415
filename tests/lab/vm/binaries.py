"""The programs that guests run: the product's, which are under test, and the stand-ins."""

import os
import pathlib
import subprocess
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
TARGET = "x86_64-unknown-linux-musl"
PROFILE = "quick"


class CannotStart(Exception):
    """Something a scenario needs is not here; the message says what to do."""


class Binaries:
    """Where binaries come from. The product's are found, never built: what is tested is what
    somebody chose. The stand-ins are the test crate's own, and built when first asked for."""

    def __init__(self) -> None:
        self.place = pathlib.Path(os.environ.get("RDMA_BIN_DIR", ROOT / "dist")).resolve()
        self.target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
        self.lock = threading.Lock()
        self.built: pathlib.Path | None = None

    def product(self, name: str) -> pathlib.Path:
        """A binary under test."""
        path = self.place / name
        if not path.is_file():
            raise CannotStart(f"no {name} in {self.place}: run `make build`, or name its folder in RDMA_BIN_DIR")
        return path

    def standin(self, name: str) -> pathlib.Path:
        """A program of the test crate, static so that a guest can run it."""
        with self.lock:
            if not self.built:
                command = ["cargo", "build", "--locked", "--quiet", "--profile", PROFILE, "--target", TARGET]
                built = subprocess.run([*command, "--package", "e2e", "--bins"], cwd=ROOT, capture_output=True, text=True)
                if built.returncode:
                    raise CannotStart(f"the stand-ins cannot be built: {built.stderr.strip()[-1000:]}")
                self.built = self.target / TARGET / PROFILE
        return self.built / name
