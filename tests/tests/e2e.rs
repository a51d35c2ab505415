//! End-to-end cases: the built binaries, driven from outside.
#![allow(
    clippy::allow_attributes,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "every line here is a test, which clippy cannot see without libtest's attributes"
)]

mod cases;
mod multus_node;
mod plugin;

fn main() -> std::process::ExitCode {
    e2e::harness::run(cases::all())
}
