//! STATUS: whether ADD could be served. Runtimes ask every few seconds: nothing here waits.

use std::fs;

use attachment::{
    addresses::Ipam,
    node::{Node, Places},
    part::Part,
};
use cni_wire::{Code, Command, Request};
use netlink::release;

use crate::{
    config::Config,
    decide::decide,
    error::Error,
    facts::{self, Facts},
};

/// Serves STATUS. Returns why pods of the network may be without a carrier.
///
/// # Errors
/// Code 50 with the reason; the IPAM's own.
pub fn run(places: &Places, subject: String, request: &Request) -> Result<Vec<String>, Error> {
    // STATUS has one code for every reason.
    let unavailable = |mut error: Error| {
        error.wire.code = Code::Unavailable;
        error
    };
    let (node, ipam, warnings) = check(places, subject, request).map_err(unavailable)?;
    ipam.ask(&node, Command::Status, request, None)?;
    Ok(warnings)
}

/// What STATUS finds by itself, without asking the IPAM. Returns the node and its IPAM, and why pods of
/// the network may be without a carrier.
///
/// # Errors
/// The reason why ADD would fail.
pub fn check(
    places: &Places,
    subject: String,
    request: &Request,
) -> Result<(Node, Ipam, Vec<String>), Error> {
    let mut node = Node::open(places, subject)?;
    check_kernel(&node)?;
    let config = Config::read(request, &node.policy.values.pkeys)?;
    let nics = facts::named_master(&mut node, &config)?;
    node.journal.check_owner()?;
    node.journal.check_writable()?;
    let ipam = Ipam::of(&node, request)?;
    let facts = Facts {
        for_one: ipam.serves_one().map(Error::from),
        ranges: ipam.rails(&node, request)?,
        mode: facts::mode(&node, &config)?,
        nics,
        ..Facts::without_pod(&node.policy.values, &node.policy.path)
    };
    let parts = decide(&config, &facts)?;
    let warnings = parts.iter().filter_map(Part::child);
    let warnings = warnings.filter_map(|child| child.warning.clone()).collect();
    Ok((node, ipam, warnings))
}

fn check_kernel(node: &Node) -> Result<(), Error> {
    let file = node.roots.proc.join("sys/kernel/osrelease");
    // A release that cannot be read says nothing; the kernel's refusals will.
    let release = fs::read_to_string(file).unwrap_or_default();
    let release = release.trim();
    if !release::is_too_old(release) {
        return Ok(());
    }
    let (major, minor) = release::MINIMUM;
    Err(Error::advise(
        Code::Unavailable,
        format_args!("the kernel is Linux {release}; rdma-netdev needs {major}.{minor} or newer"),
        "older kernels do not name the hardware below a link, by which a NIC is found after its pod; \
         install a newer kernel on this node",
    ))
}
