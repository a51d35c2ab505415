//! CHECK: the pod still has what ADD answered. Changes nothing; additions by others are allowed.

use std::{fmt::Display, net::IpAddr};

use attachment::{
    addresses::Ipam,
    journal::Key,
    netdev::{display, replay},
    node::Node,
    part::{Interface, Part},
    rdma,
};
use cni_wire::{CniResult, Code, Command, Request};
use netlink::{
    Socket, address,
    link::{self, By, Link},
    route, rule,
};
use netlink_packet_route::{AddressFamily, route::RouteMessage, rule::RuleMessage};

use super::pod_namespace;
use crate::{addressing, bind, error::Error};

/// Serves CHECK.
///
/// # Errors
/// Code 104 naming what differs; code 7 without a `prevResult`.
pub fn run(mut node: Node, request: &Request) -> Result<(), Error> {
    let id = request.attachment()?;
    let before = request.config.prev_result()?.ok_or_else(|| {
        let remedy = "CHECK compares with what ADD answered";
        Error::advise(Code::InvalidConfig, "prevResult is missing", remedy)
    })?;
    before.check_indexes()?;
    let pod = pod_namespace(&node, request)?;
    let recorded = match Key::of(&request.config.name, id) {
        Some(key) => node.journal.read(&key)?,
        None => None,
    };
    let Some(recorded) = recorded else {
        return Err(differs(format_args!(
            "the journal knows no attachment of {id}"
        )));
    };
    let mut inside = pod.socket(&node.netns.namespace)?;
    let sandbox = request.env.netns.as_deref();
    for part in &recorded.parts {
        // Of rdma-only the interface is another plugin's.
        if let Some(interface) = part.interface() {
            let link = check_interface(&mut inside, &before, sandbox, interface)?;
            if let Some(child) = part.child() {
                child.check(&link)?;
            }
            if link.is_infiniband() && !link.carrier {
                let known = part.child().and_then(|child| child.warning.as_deref());
                node.log
                    .warn(known.unwrap_or("the interface has no carrier; ibstat shows the port"));
            }
        }
        if let Some(moved) = part.moved() {
            moved.check(&mut node)?;
        }
        rdma::check(&node, &pod, part.rdma())?;
        bind::check(&node, part.slots())?;
    }
    let ipam = Ipam::of(&node, request)?;
    drop(inside);
    let rails: Option<Vec<u32>> = recorded.parts.iter().map(Part::rail).collect();
    Ok(ipam.ask(&node, Command::Check, request, rails.as_deref())?)
}

/// One interface of the attachment.
fn check_interface(
    inside: &mut Socket,
    before: &CniResult,
    sandbox: Option<&str>,
    interface: &Interface,
) -> Result<Link, Error> {
    let name = &interface.name;
    let mut interfaces = before.interfaces.iter().enumerate();
    let found = interfaces.find(|(_, i)| i.name == *name && i.sandbox.as_deref() == sandbox);
    let (index, expected) = found.ok_or_else(|| {
        let sandbox = sandbox.unwrap_or("the pod");
        differs(format_args!(
            "prevResult has no interface {name} in {sandbox}"
        ))
    })?;
    let link = link::get(inside, By::Name(name.as_bytes()))?
        .ok_or_else(|| differs(format_args!("{name} is gone from the pod")))?;
    let (mac, mtu) = (link.mac_text(), link.mtu);
    if let Some(had) = &expected.mac
        && !had.eq_ignore_ascii_case(&mac)
    {
        return Err(differs(format_args!(
            "{name} has MAC address {mac}, had {had}"
        )));
    }
    if let Some(had) = expected.mtu.filter(|had| *had != mtu) {
        return Err(differs(format_args!("{name} has MTU {mtu}, had {had}")));
    }
    if !link.is_up() {
        return Err(differs(format_args!("{name} is down")));
    }
    // Routes name no interface: those through networks of other interfaces are theirs.
    let mut ours = before.clone();
    ours.ips
        .retain(|ip| ip.interface.is_none_or(|i| i == index));
    let is_ours = |gw: IpAddr| ours.ips.iter().any(|ip| ip.address.contains(gw));
    let has_all = before.interfaces.len() < 2;
    ours.routes.retain(|r| has_all || r.gw.is_some_and(is_ours));
    let lost = |what: &dyn Display| Err(differs(format_args!("{name} has lost {what}")));
    let addresses = address::list(inside, link.index)?;
    let addresses: Vec<_> = addresses.iter().filter_map(addressing::cidr).collect();
    if let Some(ip) = ours.ips.iter().find(|ip| !addresses.contains(&ip.address)) {
        return lost(&format_args!("address {}", ip.address));
    }
    for (route, expected) in ours.routes.iter().zip(addressing::routes(&ours)) {
        let expected = replay::route(&expected, 0, link.index);
        let family = expected.header.address_family;
        if !(route::list(inside, family, link.index)?.iter()).any(|found| same(found, &expected)) {
            return lost(&format_args!("the route to {}", route.dst));
        }
    }
    let rules = match interface.config.rules.as_slice() {
        [] => Vec::new(),
        _ => rule::list(inside, AddressFamily::Unspec)?,
    };
    let text = |rule: &RuleMessage| (rule.header.family, display::rule(rule));
    let rules: Vec<_> = rules.iter().map(text).collect();
    match (interface.config.rules.iter()).find(|rule| !rules.contains(&text(rule))) {
        Some(rule) => lost(&format_args!("the rule {}", display::rule(rule))),
        None => Ok(link),
    }
}

fn differs(what: impl Display) -> Error {
    Error::new(Code::Differs, what)
}

fn same(found: &RouteMessage, expected: &RouteMessage) -> bool {
    let key = |route: &RouteMessage| {
        let prefix = route.header.destination_prefix_length;
        (
            route::table_of(route),
            route::destination(route),
            prefix,
            replay::gateway(route),
        )
    };
    key(found) == key(expected)
}
