//! The log, and what of the kernel's and the journal's doings stands in it.

pub use node::log::Log;
use node::policy::LogLevel;

use netlink::socket;

/// The name of this program in each line.
pub const PROGRAM: &str = "rdma-netdev";

/// Has each request to the kernel and each lock that is waited for written to a log of level debug.
/// For the whole process: the first log stays.
pub fn observe(log: &Log) {
    if !log.writes(LogLevel::Debug) {
        return;
    }
    let log = log.clone();
    socket::observe(move |line| log.debug(line));
}
