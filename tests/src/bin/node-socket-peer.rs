//! A peer of the daemon's socket that is none of our programs: sends standard input as it is, shuts
//! its writing side down and prints what comes back.

use std::io::{copy, stdin, stdout};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let socket = std::env::args_os()
        .nth(1)
        .context("usage: node-socket-peer SOCKET")?;
    let mut stream = UnixStream::connect(socket).context("connect")?;
    // A server that refuses the peer may have closed already: its answer can be read all the same.
    let _ = copy(&mut stdin(), &mut stream);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = copy(&mut stream, &mut stdout());
    Ok(())
}
