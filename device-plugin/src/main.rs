//! Parses and calls.

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_device_plugin::cli::main()
}
