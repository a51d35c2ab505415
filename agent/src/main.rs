//! Parses and calls.

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_agent::cli::main()
}
