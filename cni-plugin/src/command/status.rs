//! STATUS: whether ADD could be served. Runtimes ask every few seconds: nothing here waits.

use std::fs;

use attachment::{
    addresses::Ipam,
    node::{Node, Places},
};
use cni_wire::{Code, Command, Request};
use netlink::{
    link::{self, By},
    release,
};

use crate::{
    authorize::{Asked, Rules, by_policy},
    config::{Config, Devices},
    error::Error,
    parts::Numbering,
    rdma::{self, RdmaRequirement},
    resolve::{self, Resolved},
};

/// Serves STATUS.
///
/// # Errors
/// Code 50 with the reason; the IPAM's own.
pub fn run(places: &Places, subject: String, request: &Request) -> Result<(), Error> {
    // STATUS has one code for every reason.
    let unavailable = |mut error: Error| {
        error.wire.code = Code::Unavailable;
        error
    };
    let (node, ipam) = check(places, subject, request).map_err(unavailable)?;
    Ok(ipam.ask(&node, Command::Status, request)?)
}

/// What STATUS finds by itself.
fn check(places: &Places, subject: String, request: &Request) -> Result<(Node, Ipam), Error> {
    let mut node = Node::open(places, subject)?;
    check_kernel(&node)?;
    let config = Config::read(request, &node.policy.values.pkeys)?;
    if config.rdma == RdmaRequirement::Required {
        rdma::isolation(hca::netns_mode(&node.roots)?)?;
    }
    if let Some(master) = &config.master
        && link::get(&mut node.netns.socket, By::Name(master.as_bytes()))?.is_none()
    {
        return Err(Error::new(
            Code::Unavailable,
            format!("master: netdev {master} does not exist on this host"),
        )
        .with_details("correct the name, or leave it out where Multus passes a deviceID"));
    }
    let master = resolve::named_master(&mut node, &config)?;
    if let Some(master) = &master {
        let asked = Asked {
            config: &config,
            moves_rdma: false,
        };
        let rules = Rules {
            allow: &node.policy.values.allow,
            path: &node.policy.path,
            // Which pod may have these, STATUS does not ask.
            exclusive: &[],
        };
        by_policy(master, asked, rules)?;
    }
    node.journal.check_owner()?;
    node.journal.check_writable()?;
    let ipam = Ipam::of(&node, request)?;
    if config.devices == Devices::All {
        ipam.serves_several()?;
    } else {
        let ranges = ipam.rails(&node, request)?;
        let rail = Numbering {
            asked: config.rail,
            ranges: ranges.as_ref(),
            rails: &node.policy.values.rails,
            path: &node.policy.path,
        };
        let host = master.as_ref().and_then(Resolved::host_link);
        rail.one(host)?;
    }
    Ok((node, ipam))
}

fn check_kernel(node: &Node) -> Result<(), Error> {
    let file = node.roots.proc.join("sys/kernel/osrelease");
    // A release that cannot be read says nothing; the kernel's refusals will.
    let release = fs::read_to_string(file).unwrap_or_default();
    if !release::is_too_old(release.trim()) {
        return Ok(());
    }
    let (major, minor) = release::MINIMUM;
    Err(Error::new(
        Code::Unavailable,
        format!(
            "the kernel is Linux {}; rdma-netdev needs {major}.{minor} or newer",
            release.trim()
        ),
    )
    .with_details(
        "older kernels do not name the hardware below a link, by which a NIC is known again after \
         its pod; install a newer kernel on this node",
    ))
}
