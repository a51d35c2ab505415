//! Parses and calls.

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_ipam_broker::cli::main()
}
